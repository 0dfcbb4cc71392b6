mock_provider "aws" {
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
  mock_data "aws_region" {
    defaults = { name = "eu-central-1" }
  }
  mock_resource "aws_iam_role" {
    defaults = { arn = "arn:aws:iam::123456789012:role/mock" }
  }
  mock_resource "aws_kms_key" {
    defaults = { arn = "arn:aws:kms:eu-central-1:123456789012:key/mock" }
  }
  mock_resource "aws_s3_bucket" {
    defaults = { id = "files", arn = "arn:aws:s3:::files" }
  }
  mock_resource "aws_launch_template" {
    defaults = { id = "lt-0123456789abcdef0", latest_version = 1 }
  }
  mock_resource "aws_elasticache_replication_group" {
    defaults = { primary_endpoint_address = "valkey.example.internal" }
  }
  mock_resource "aws_db_instance" {
    defaults = {
      address            = "db.example.internal"
      master_user_secret = [{ secret_arn = "arn:aws:secretsmanager:eu-central-1:123456789012:secret:mock" }]
    }
  }
}

variables {
  admin_principal_arns = ["arn:aws:iam::123456789012:role/admins"]
  public_access_cidrs  = ["192.0.2.0/24"]
  limits_password      = "0123456789abcdef0123456789abcdef"
  ray_password         = "fedcba9876543210fedcba9876543210"
  image                = { repository = "registry.example.com/footplate", tag = "0.1.0-cuda" }
}

run "all_parts_fit_together" {
  command = apply

  assert {
    condition     = yamldecode(output.helm_values).gcs.address == "rediss://valkey.example.internal:6379"
    error_message = "the chart must hear of Ray's store"
  }
  assert {
    condition     = length(output.secret_arns) == 4
    error_message = "three holders and the database's secret"
  }
}
