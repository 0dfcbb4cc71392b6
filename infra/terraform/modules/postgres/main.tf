locals {
  port     = 5432
  database = "footplate"
  user     = "footplate"
}

resource "aws_db_subnet_group" "this" {
  name        = var.name
  description = "Private subnets of ${var.name}"
  subnet_ids  = var.subnet_ids
  tags        = var.tags
}

resource "aws_security_group" "this" {
  name        = "${var.name}-postgres"
  description = "PostgreSQL ${var.name}: from the nodes only."
  vpc_id      = var.vpc_id
  tags        = merge(var.tags, { Name = "${var.name}-postgres" })
}

resource "aws_vpc_security_group_ingress_rule" "clients" {
  for_each                     = var.client_security_group_ids
  security_group_id            = aws_security_group.this.id
  description                  = "PostgreSQL from ${each.key}"
  referenced_security_group_id = each.value
  ip_protocol                  = "tcp"
  from_port                    = local.port
  to_port                      = local.port
}

resource "aws_db_parameter_group" "this" {
  name_prefix = "${var.name}-"
  description = "Parameters of ${var.name}"
  family      = "postgres${split(".", var.engine_version)[0]}"

  parameter {
    name  = "rds.force_ssl"
    value = "1"
  }

  parameter {
    name         = "max_connections"
    value        = tostring(var.max_connections)
    apply_method = "pending-reboot"
  }

  # An event counts as durable once its commit has returned.
  parameter {
    name  = "synchronous_commit"
    value = "on"
  }

  lifecycle {
    create_before_destroy = true
  }

  tags = var.tags
}

resource "aws_db_instance" "this" {
  identifier                          = var.name
  engine                              = "postgres"
  engine_version                      = var.engine_version
  instance_class                      = var.instance_class
  db_name                             = local.database
  username                            = local.user
  manage_master_user_password         = true # in Secrets Manager, rotated there, never in the state
  port                                = local.port
  allocated_storage                   = var.storage_gib
  max_allocated_storage               = var.max_storage_gib
  storage_type                        = "gp3"
  storage_encrypted                   = true
  kms_key_id                          = var.kms_key_arn
  multi_az                            = var.multi_az
  publicly_accessible                 = false
  db_subnet_group_name                = aws_db_subnet_group.this.name
  vpc_security_group_ids              = [aws_security_group.this.id]
  parameter_group_name                = aws_db_parameter_group.this.name
  backup_retention_period             = var.backup_retention_days
  copy_tags_to_snapshot               = true
  delete_automated_backups            = !var.is_protected
  deletion_protection                 = var.is_protected
  skip_final_snapshot                 = !var.is_protected
  final_snapshot_identifier           = var.is_protected ? "${var.name}-final" : null
  auto_minor_version_upgrade          = true
  performance_insights_enabled        = true
  enabled_cloudwatch_logs_exports     = ["postgresql"]
  iam_database_authentication_enabled = false
  tags                                = var.tags
}
