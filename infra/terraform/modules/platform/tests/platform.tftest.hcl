mock_provider "aws" {
  mock_resource "aws_iam_role" {
    defaults = { id = "footplate-pods", arn = "arn:aws:iam::123456789012:role/footplate-pods" }
  }
}

variables {
  name         = "footplate"
  cluster_name = "footplate"
  files = {
    bucket_arn  = "arn:aws:s3:::footplate-files"
    kms_key_arn = "arn:aws:kms:eu-central-1:123456789012:key/mock"
    files_url   = "s3://footplate-files/files"
  }
  postgres = {
    host                = "db.example.internal"
    port                = 5432
    database            = "footplate"
    user                = "footplate"
    password_secret_arn = "arn:aws:secretsmanager:eu-central-1:123456789012:secret:mock"
  }
  limits_valkey = { host = "limits.example.internal", port = 6379 }
  ray_valkey    = { host = "ray.example.internal", port = 6379 }
  image         = { repository = "registry.example.com/footplate", tag = "0.1.0-cuda" }
}

run "pods_reach_their_files_and_nothing_else" {
  command = apply

  assert {
    condition     = jsondecode(aws_iam_role_policy.files.policy).Statement[0].Resource == "arn:aws:s3:::footplate-files/files/*"
    error_message = "only objects under the prefix of files_url"
  }
  assert {
    condition     = !anytrue([for s in jsondecode(aws_iam_role_policy.files.policy).Statement : contains(tolist(flatten([s.Resource])), "*")])
    error_message = "no statement may be about everything"
  }
  assert {
    condition     = aws_eks_pod_identity_association.pods.namespace == "footplate" && aws_eks_pod_identity_association.pods.service_account == "footplate"
    error_message = "the role belongs to the chart's service account"
  }
}

run "values_for_the_chart_hold_no_secret" {
  command = apply

  assert {
    condition     = yamldecode(output.helm_values).gcs.address == "rediss://ray.example.internal:6379"
    error_message = "Ray's store is reached with TLS"
  }
  assert {
    condition     = yamldecode(output.helm_values).config.storage.files_url == "s3://footplate-files/files"
    error_message = "files go to the bucket"
  }
  assert {
    condition     = output.database_url_without_password == "postgresql+psycopg://footplate:PASSWORD@db.example.internal:5432/footplate?sslmode=require"
    error_message = "the URL must be one that the configuration takes"
  }
  assert {
    condition     = keys(output.secret_arns) == ["database", "limits-password", "master-key", "ray-password"]
    error_message = "every secret of the chart has a holder"
  }
}

run "latest_is_refused" {
  command = plan
  variables {
    image = { repository = "registry.example.com/footplate", tag = "latest" }
  }
  expect_failures = [var.image]
}
