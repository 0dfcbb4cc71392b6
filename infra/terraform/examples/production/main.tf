# Three zones, a standby of everything that holds state, a private API server, and nothing that can be deleted by accident.
# Keep the state in an encrypted bucket with locking: a backend is yours to choose, so none stands here.

locals {
  name = "footplate"
}

module "network" {
  source              = "../../modules/network"
  name                = local.name
  availability_zones  = var.availability_zones
  flow_log_bucket_arn = var.flow_log_bucket_arn
}

module "eks" {
  source               = "../../modules/eks"
  name                 = local.name
  vpc_id               = module.network.vpc_id
  subnet_ids           = module.network.private_subnet_ids
  admin_principal_arns = var.admin_principal_arns
  node_groups = {
    system = {
      instance_types = ["m7i.xlarge"], min_size = 3, max_size = 6, desired_size = 3
      labels         = { "footplate.io/role" = "system" }
    }
    gateway = {
      instance_types = ["c7i.2xlarge"], min_size = 3, max_size = 9, desired_size = 3
      labels         = { "footplate.io/role" = "gateway" }
    }
  }
  gpu_node_groups = {
    engines = {
      instance_types = [var.gpu_instance_type]
      min_size       = var.num_gpu_nodes.usual
      desired_size   = var.num_gpu_nodes.usual
      max_size       = var.num_gpu_nodes.most
      subnet_ids     = [module.network.private_subnet_ids[index(var.availability_zones, var.gpu_zone)]]
    }
  }
}

module "postgres" {
  source                    = "../../modules/postgres"
  name                      = local.name
  vpc_id                    = module.network.vpc_id
  subnet_ids                = module.network.private_subnet_ids
  client_security_group_ids = { nodes = module.eks.node_security_group_id }
  backup_retention_days     = 35
}

module "limits_valkey" {
  source                    = "../../modules/valkey"
  name                      = "${local.name}-limits"
  purpose                   = "limits"
  vpc_id                    = module.network.vpc_id
  subnet_ids                = module.network.private_subnet_ids
  client_security_group_ids = { nodes = module.eks.node_security_group_id }
  auth_token                = var.limits_password
  num_nodes                 = 3
}

module "ray_valkey" {
  source                    = "../../modules/valkey"
  name                      = "${local.name}-ray"
  purpose                   = "ray"
  vpc_id                    = module.network.vpc_id
  subnet_ids                = module.network.private_subnet_ids
  client_security_group_ids = { nodes = module.eks.node_security_group_id }
  auth_token                = var.ray_password
  node_type                 = "cache.m7g.large"
  num_nodes                 = 2
}

module "storage" {
  source      = "../../modules/storage"
  bucket_name = var.bucket_name
}

module "platform" {
  source        = "../../modules/platform"
  name          = local.name
  cluster_name  = module.eks.cluster_name
  files         = module.storage
  postgres      = module.postgres
  limits_valkey = module.limits_valkey
  ray_valkey    = module.ray_valkey
  image         = var.image
}
