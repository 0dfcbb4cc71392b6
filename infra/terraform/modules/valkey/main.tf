locals {
  port = 6379
}

resource "aws_elasticache_subnet_group" "this" {
  name        = var.name
  description = "Private subnets of ${var.name}"
  subnet_ids  = var.subnet_ids
  tags        = var.tags
}

resource "aws_security_group" "this" {
  name        = "${var.name}-valkey"
  description = "Valkey ${var.name}: from the nodes only."
  vpc_id      = var.vpc_id
  tags        = merge(var.tags, { Name = "${var.name}-valkey" })
}

resource "aws_vpc_security_group_ingress_rule" "clients" {
  for_each                     = var.client_security_group_ids
  security_group_id            = aws_security_group.this.id
  description                  = "Valkey from ${each.key}"
  referenced_security_group_id = each.value
  ip_protocol                  = "tcp"
  from_port                    = local.port
  to_port                      = local.port
}

resource "aws_elasticache_parameter_group" "this" {
  name        = var.name
  description = "Parameters of ${var.name}"
  family      = "valkey${split(".", var.engine_version)[0]}"

  # An evicted counter would be a limit that nobody holds, an evicted key of Ray's a cluster that can't recover.
  parameter {
    name  = "maxmemory-policy"
    value = "noeviction"
  }

  tags = var.tags
}

resource "aws_elasticache_replication_group" "this" {
  replication_group_id       = var.name
  description                = "Footplate: ${var.purpose}"
  engine                     = "valkey"
  engine_version             = var.engine_version
  node_type                  = var.node_type
  num_cache_clusters         = var.num_nodes
  port                       = local.port
  parameter_group_name       = aws_elasticache_parameter_group.this.name
  subnet_group_name          = aws_elasticache_subnet_group.this.name
  security_group_ids         = [aws_security_group.this.id]
  automatic_failover_enabled = var.num_nodes > 1
  multi_az_enabled           = var.num_nodes > 1
  at_rest_encryption_enabled = true
  kms_key_id                 = var.kms_key_arn
  transit_encryption_enabled = true
  transit_encryption_mode    = "required"
  auth_token                 = var.auth_token
  auth_token_update_strategy = "ROTATE"
  snapshot_retention_limit   = var.snapshot_retention_days
  apply_immediately          = false
  tags                       = var.tags
}
