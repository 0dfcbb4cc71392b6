mock_provider "aws" {
  mock_resource "aws_elasticache_replication_group" {
    defaults = { primary_endpoint_address = "primary.example.internal" }
  }
}

variables {
  name                      = "footplate-limits"
  purpose                   = "limits"
  vpc_id                    = "vpc-1"
  subnet_ids                = ["subnet-1", "subnet-2"]
  client_security_group_ids = { nodes = "sg-nodes" }
  auth_token                = "0123456789abcdef0123456789abcdef"
}

run "encrypted_highly_available_and_never_evicting" {
  command = apply

  assert {
    condition     = aws_elasticache_replication_group.this.transit_encryption_mode == "required" && aws_elasticache_replication_group.this.at_rest_encryption_enabled == "true"
    error_message = "TLS and encryption at rest are not optional"
  }
  assert {
    condition     = aws_elasticache_replication_group.this.automatic_failover_enabled && aws_elasticache_replication_group.this.multi_az_enabled
    error_message = "two nodes must fail over"
  }
  assert {
    condition     = one(aws_elasticache_parameter_group.this.parameter).value == "noeviction" && aws_elasticache_parameter_group.this.family == "valkey8"
    error_message = "counters must not be evicted"
  }
  assert {
    condition     = output.url_without_password == "rediss://primary.example.internal:6379"
    error_message = "the URL must ask for TLS and hold no password"
  }
  assert {
    condition     = keys(aws_vpc_security_group_ingress_rule.clients) == ["nodes"]
    error_message = "only the nodes may connect"
  }
}

run "one_node_has_nothing_to_fail_over_to" {
  command = plan
  variables {
    num_nodes = 1
  }

  assert {
    condition     = aws_elasticache_replication_group.this.automatic_failover_enabled == false
    error_message = "AWS refuses failover with one node"
  }
}

run "a_short_password_is_refused" {
  command = plan
  variables {
    auth_token = "secret"
  }
  expect_failures = [var.auth_token]
}

run "another_purpose_is_refused" {
  command = plan
  variables {
    purpose = "cache"
  }
  expect_failures = [var.purpose]
}
