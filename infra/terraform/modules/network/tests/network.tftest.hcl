mock_provider "aws" {
  mock_data "aws_region" {
    defaults = { name = "eu-central-1" }
  }
}

variables {
  name               = "footplate"
  availability_zones = ["eu-central-1a", "eu-central-1b", "eu-central-1c"]
}

run "a_private_and_a_public_subnet_in_each_zone" {
  command = plan

  assert {
    condition     = length(aws_subnet.private) == 3 && length(aws_subnet.public) == 3
    error_message = "each zone needs both subnets"
  }
  assert {
    condition     = aws_subnet.private["eu-central-1b"].cidr_block == "10.40.32.0/19"
    error_message = "private subnets are eighths of the block"
  }
  assert {
    condition     = length(setintersection([for s in aws_subnet.private : s.cidr_block], [for s in aws_subnet.public : s.cidr_block])) == 0
    error_message = "subnets must not overlap"
  }
  assert {
    condition     = alltrue([for s in aws_subnet.public : s.map_public_ip_on_launch == false])
    error_message = "nothing gets a public address by itself"
  }
}

run "nat_per_zone_or_one" {
  command = plan
  variables {
    nat_per_zone = false
  }

  assert {
    condition     = length(aws_nat_gateway.this) == 1 && length(aws_route.nat) == 3
    error_message = "one NAT gateway must serve all private subnets"
  }
}

run "no_flow_logs_unless_asked" {
  command = plan

  assert {
    condition     = length(aws_flow_log.this) == 0 && length(aws_nat_gateway.this) == 3
    error_message = "flow logs need a bucket; NAT is per zone by default"
  }
}

run "one_zone_is_refused" {
  command = plan
  variables {
    availability_zones = ["eu-central-1a"]
  }
  expect_failures = [var.availability_zones]
}

run "a_small_block_is_refused" {
  command = plan
  variables {
    cidr = "10.0.0.0/24"
  }
  expect_failures = [var.cidr]
}
