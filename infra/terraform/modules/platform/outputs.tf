output "pod_role_arn" {
  description = "Role of the chart's pods."
  value       = aws_iam_role.pods.arn
}

output "secret_arns" {
  description = "Secrets to be filled, by name; infra/README.md says how they become a Kubernetes secret."
  value       = merge({ for name, secret in aws_secretsmanager_secret.this : name => secret.arn }, { database = var.postgres.password_secret_arn })
}

output "database_url_without_password" {
  description = "Form of FOOTPLATE_STORAGE__DATABASE_URL; PASSWORD stands for what the secret holds, URL-encoded."
  value       = "postgresql+psycopg://${var.postgres.user}:PASSWORD@${var.postgres.host}:${var.postgres.port}/${var.postgres.database}?sslmode=require"
}

output "redis_url_without_password" {
  description = "Form of FOOTPLATE_STORAGE__REDIS_URL."
  value       = "rediss://:PASSWORD@${var.limits_valkey.host}:${var.limits_valkey.port}/0"
}

output "helm_values" {
  description = "Values for infra/helm/footplate that come from the cloud: terraform output -raw helm_values > values-cloud.yaml."
  value = yamlencode({
    image          = var.image
    serviceAccount = { name = var.service_account }
    config         = { storage = { files_url = var.files.files_url } }
    gcs            = { address = "rediss://${var.ray_valkey.host}:${var.ray_valkey.port}" }
  })
}
