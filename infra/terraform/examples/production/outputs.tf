output "cluster_name" {
  description = "For: aws eks update-kubeconfig --name …"
  value       = module.eks.cluster_name
}

output "helm_values" {
  description = "Values of the chart that come from the cloud."
  value       = module.platform.helm_values
}

output "secret_arns" {
  description = "Secrets to be filled."
  value       = module.platform.secret_arns
}

output "database_url_without_password" {
  description = "Form of FOOTPLATE_STORAGE__DATABASE_URL."
  value       = module.platform.database_url_without_password
}

output "redis_url_without_password" {
  description = "Form of FOOTPLATE_STORAGE__REDIS_URL."
  value       = module.platform.redis_url_without_password
}
