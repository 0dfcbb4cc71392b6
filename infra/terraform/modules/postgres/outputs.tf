output "host" {
  description = "Name of the instance; it follows a failover."
  value       = aws_db_instance.this.address
}

output "port" {
  description = "Port."
  value       = local.port
}

output "database" {
  description = "Name of the database."
  value       = local.database
}

output "user" {
  description = "User that owns it."
  value       = local.user
}

output "password_secret_arn" {
  description = "Secret of Secrets Manager that holds user and password; AWS rotates it."
  value       = aws_db_instance.this.master_user_secret[0].secret_arn
}
