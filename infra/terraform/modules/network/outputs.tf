output "vpc_id" {
  description = "The VPC."
  value       = aws_vpc.this.id
}

output "vpc_cidr" {
  description = "The VPC's addresses."
  value       = aws_vpc.this.cidr_block
}

output "private_subnet_ids" {
  description = "Where nodes, databases and caches live, in the order of the zones."
  value       = [for zone in var.availability_zones : aws_subnet.private[zone].id]
}

output "public_subnet_ids" {
  description = "Where public load balancers stand, in the order of the zones."
  value       = [for zone in var.availability_zones : aws_subnet.public[zone].id]
}
