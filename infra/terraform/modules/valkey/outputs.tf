output "host" {
  description = "Name of the primary; it follows a failover."
  value       = aws_elasticache_replication_group.this.primary_endpoint_address
}

output "port" {
  description = "Port."
  value       = local.port
}

output "url_without_password" {
  description = "The address with TLS, for people. Clients take the password from a secret."
  value       = "rediss://${aws_elasticache_replication_group.this.primary_endpoint_address}:${local.port}"
}
