# The smallest cluster that serves a model on a GPU: for trials. One NAT gateway, no standby, deletable.

locals {
  name = "footplate-trial"
}

module "network" {
  source              = "../../modules/network"
  name                = local.name
  availability_zones  = ["${var.region}a", "${var.region}b"]
  nat_per_zone        = false
  interface_endpoints = []
}

module "eks" {
  source               = "../../modules/eks"
  name                 = local.name
  vpc_id               = module.network.vpc_id
  subnet_ids           = module.network.private_subnet_ids
  public_access_cidrs  = var.public_access_cidrs
  admin_principal_arns = var.admin_principal_arns
  node_groups = {
    system = {
      instance_types = ["m7i.xlarge"], min_size = 2, max_size = 3, desired_size = 2
      labels         = { "footplate.io/role" = "system" }
    }
  }
  gpu_node_groups = {
    l4 = { instance_types = ["g6.xlarge"], min_size = 0, max_size = 1, desired_size = 1 }
  }
}

module "postgres" {
  source                    = "../../modules/postgres"
  name                      = local.name
  vpc_id                    = module.network.vpc_id
  subnet_ids                = module.network.private_subnet_ids
  client_security_group_ids = { nodes = module.eks.node_security_group_id }
  instance_class            = "db.t4g.medium"
  storage_gib               = 20
  max_storage_gib           = 100
  max_connections           = 150
  multi_az                  = false
  backup_retention_days     = 1
  is_protected              = false
}

module "limits_valkey" {
  source                    = "../../modules/valkey"
  name                      = "${local.name}-limits"
  purpose                   = "limits"
  vpc_id                    = module.network.vpc_id
  subnet_ids                = module.network.private_subnet_ids
  client_security_group_ids = { nodes = module.eks.node_security_group_id }
  auth_token                = var.limits_password
  node_type                 = "cache.t4g.small"
  num_nodes                 = 1
  snapshot_retention_days   = 0
}

module "ray_valkey" {
  source                    = "../../modules/valkey"
  name                      = "${local.name}-ray"
  purpose                   = "ray"
  vpc_id                    = module.network.vpc_id
  subnet_ids                = module.network.private_subnet_ids
  client_security_group_ids = { nodes = module.eks.node_security_group_id }
  auth_token                = var.ray_password
  node_type                 = "cache.t4g.small"
  num_nodes                 = 1
  snapshot_retention_days   = 0
}

module "storage" {
  source            = "../../modules/storage"
  bucket_name       = "${local.name}-files"
  expire_after_days = 30
  is_protected      = false
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
