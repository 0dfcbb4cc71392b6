output "cluster_name" {
  description = "Name of the cluster."
  value       = aws_eks_cluster.this.name
}

output "cluster_endpoint" {
  description = "URL of the API server."
  value       = aws_eks_cluster.this.endpoint
}

output "node_security_group_id" {
  description = "Security group of all nodes, for rules of databases and caches."
  value       = aws_eks_cluster.this.vpc_config[0].cluster_security_group_id
}

output "node_group_names" {
  description = "Names of all node groups."
  value       = sort(keys(aws_eks_node_group.this))
}
