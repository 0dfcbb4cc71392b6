variable "region" {
  description = "AWS region."
  type        = string
}

variable "availability_zones" {
  description = "Three zones of the region."
  type        = list(string)

  validation {
    condition     = length(var.availability_zones) == 3
    error_message = "Production wants three zones."
  }
}

variable "gpu_zone" {
  description = "The zone in which your GPU capacity is."
  type        = string

  validation {
    condition     = contains(var.availability_zones, var.gpu_zone)
    error_message = "gpu_zone must be one of availability_zones."
  }
}

variable "admin_principal_arns" {
  description = "IAM roles that administer the cluster, from inside the VPC."
  type        = set(string)
}

variable "flow_log_bucket_arn" {
  description = "Bucket that gets the VPC's flow logs; null keeps none."
  type        = string
  default     = null
}

variable "bucket_name" {
  description = "Name of the bucket of files; such names are unique in the world."
  type        = string
}

variable "gpu_instance_type" {
  description = "Instance type of engines."
  type        = string
  default     = "p5en.48xlarge"
}

variable "num_gpu_nodes" {
  description = "GPU nodes: the usual number and the most."
  type        = object({ usual = number, most = number })
  default     = { usual = 1, most = 4 }
}

variable "limits_password" {
  description = "Password of the Valkey of limits: TF_VAR_limits_password."
  type        = string
  sensitive   = true
}

variable "ray_password" {
  description = "Password of the Valkey of Ray: TF_VAR_ray_password."
  type        = string
  sensitive   = true
}

variable "image" {
  description = "The image to run."
  type        = object({ repository = string, tag = string })
}
