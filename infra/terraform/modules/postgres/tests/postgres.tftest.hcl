mock_provider "aws" {
  mock_resource "aws_db_instance" {
    defaults = {
      address            = "db.example.internal"
      master_user_secret = [{ secret_arn = "arn:aws:secretsmanager:eu-central-1:123456789012:secret:mock" }]
    }
  }
}

variables {
  name                      = "footplate"
  vpc_id                    = "vpc-1"
  subnet_ids                = ["subnet-1", "subnet-2"]
  client_security_group_ids = { nodes = "sg-nodes" }
}

run "the_ledger_is_kept_safe" {
  command = apply

  assert {
    condition     = aws_db_instance.this.storage_encrypted && aws_db_instance.this.multi_az && aws_db_instance.this.deletion_protection && !aws_db_instance.this.publicly_accessible
    error_message = "encrypted, with a standby, protected and private"
  }
  assert {
    condition     = aws_db_instance.this.manage_master_user_password && aws_db_instance.this.password == null
    error_message = "the password must not enter the state"
  }
  assert {
    condition     = !aws_db_instance.this.skip_final_snapshot && aws_db_instance.this.final_snapshot_identifier == "footplate-final"
    error_message = "a last snapshot is taken"
  }
  assert {
    condition     = contains([for p in aws_db_parameter_group.this.parameter : "${p.name}=${p.value}"], "rds.force_ssl=1") && contains([for p in aws_db_parameter_group.this.parameter : "${p.name}=${p.value}"], "synchronous_commit=on")
    error_message = "connections use TLS, and a commit is durable"
  }
}

run "unprotected_for_trials_only_when_asked" {
  command = plan
  variables {
    is_protected = false
    multi_az     = false
  }

  assert {
    condition     = aws_db_instance.this.skip_final_snapshot && !aws_db_instance.this.deletion_protection
    error_message = "a trial must be deletable"
  }
}

run "no_backups_are_refused" {
  command = plan
  variables {
    backup_retention_days = 0
  }
  expect_failures = [var.backup_retention_days]
}

run "storage_that_cannot_grow_is_refused" {
  command = plan
  variables {
    max_storage_gib = 50
  }
  expect_failures = [var.max_storage_gib]
}
