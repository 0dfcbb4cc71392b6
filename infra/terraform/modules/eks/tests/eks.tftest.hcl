mock_provider "aws" {
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
  mock_resource "aws_iam_role" {
    defaults = { arn = "arn:aws:iam::123456789012:role/mock" }
  }
  mock_resource "aws_kms_key" {
    defaults = { arn = "arn:aws:kms:eu-central-1:123456789012:key/mock" }
  }
  mock_resource "aws_launch_template" {
    defaults = { id = "lt-0123456789abcdef0", latest_version = 1 }
  }
}

variables {
  name       = "footplate"
  vpc_id     = "vpc-1"
  subnet_ids = ["subnet-1", "subnet-2"]
  node_groups = {
    system = { instance_types = ["m7i.xlarge"], min_size = 2, max_size = 4, desired_size = 2, labels = { "footplate.io/role" = "system" } }
  }
  gpu_node_groups = {
    h200 = { instance_types = ["p5en.48xlarge"], min_size = 0, max_size = 2, desired_size = 1, subnet_ids = ["subnet-2"] }
  }
  admin_principal_arns = ["arn:aws:iam::123456789012:role/admins"]
}

run "gpu_nodes_are_tainted_and_others_are_not" {
  command = apply

  assert {
    condition     = one(aws_eks_node_group.this["h200"].taint).key == "nvidia.com/gpu"
    error_message = "only engines may come to GPU nodes"
  }
  assert {
    condition     = length(aws_eks_node_group.this["system"].taint) == 0 && aws_eks_node_group.this["system"].labels["footplate.io/role"] == "system"
    error_message = "the system group takes everything else"
  }
  assert {
    condition     = aws_eks_node_group.this["h200"].ami_type == "AL2023_x86_64_NVIDIA" && aws_eks_node_group.this["h200"].subnet_ids == toset(["subnet-2"])
    error_message = "GPU nodes need drivers, and the zone that has them"
  }
}

run "the_api_server_is_closed_and_secrets_are_encrypted" {
  command = apply

  assert {
    condition     = aws_eks_cluster.this.vpc_config[0].endpoint_public_access == false && aws_eks_cluster.this.vpc_config[0].endpoint_private_access
    error_message = "without public_access_cidrs the API server is private"
  }
  assert {
    condition     = contains(aws_eks_cluster.this.encryption_config[0].resources, "secrets")
    error_message = "Kubernetes secrets must be encrypted by our key"
  }
  assert {
    condition     = alltrue([for t in aws_launch_template.node : t.metadata_options[0].http_tokens == "required" && t.metadata_options[0].http_put_response_hop_limit == 1])
    error_message = "pods must not reach the node's credentials"
  }
  assert {
    condition     = jsondecode(aws_eks_addon.this["vpc-cni"].configuration_values).enableNetworkPolicy == "true"
    error_message = "the chart's network policies need a CNI that enforces them"
  }
}

run "the_whole_internet_is_refused" {
  command = plan
  variables {
    public_access_cidrs = ["0.0.0.0/0"]
  }
  expect_failures = [var.public_access_cidrs]
}

run "a_group_of_impossible_size_is_refused" {
  command = plan
  variables {
    gpu_node_groups = { bad = { instance_types = ["g6.xlarge"], min_size = 2, max_size = 1, desired_size = 1 } }
  }
  expect_failures = [var.gpu_node_groups]
}

run "a_gpu_group_without_gpus_is_refused" {
  command = plan
  variables {
    gpu_node_groups = { bad = { instance_types = ["m7i.xlarge"], min_size = 0, max_size = 1, desired_size = 1 } }
  }
  expect_failures = [var.gpu_node_groups]
}
