mock_provider "aws" {
  mock_resource "aws_s3_bucket" {
    defaults = { id = "footplate-files", arn = "arn:aws:s3:::footplate-files" }
  }
  mock_resource "aws_kms_key" {
    defaults = { arn = "arn:aws:kms:eu-central-1:123456789012:key/mock" }
  }
}

variables {
  bucket_name = "footplate-files"
}

run "private_encrypted_and_kept" {
  command = apply

  assert {
    condition     = aws_s3_bucket_public_access_block.files.block_public_policy && aws_s3_bucket_public_access_block.files.restrict_public_buckets
    error_message = "nothing in it is public"
  }
  assert {
    condition     = one(aws_s3_bucket_server_side_encryption_configuration.files.rule).apply_server_side_encryption_by_default[0].sse_algorithm == "aws:kms"
    error_message = "objects are encrypted by our key"
  }
  assert {
    condition     = jsondecode(aws_s3_bucket_policy.files.policy).Statement[0].Condition.Bool["aws:SecureTransport"] == "false"
    error_message = "plain HTTP is denied"
  }
  assert {
    condition     = !aws_s3_bucket.files.force_destroy && length(aws_s3_bucket_lifecycle_configuration.files.rule) == 1
    error_message = "files stay until somebody deletes them"
  }
  assert {
    condition     = output.files_url == "s3://footplate-files/files"
    error_message = "files_url must be one that fsspec knows"
  }
}

run "files_may_expire" {
  command = plan
  variables {
    expire_after_days = 30
  }

  assert {
    condition     = contains([for rule in aws_s3_bucket_lifecycle_configuration.files.rule : rule.id], "expire")
    error_message = "there must be a rule that deletes"
  }
}

run "expiry_within_a_batch_is_refused" {
  command = plan
  variables {
    expire_after_days = 1
  }
  expect_failures = [var.expire_after_days]
}
