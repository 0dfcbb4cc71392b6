variable "region" {
  description = "AWS region."
  type        = string
  default     = "eu-central-1"
}

variable "admin_principal_arns" {
  description = "IAM roles or users that administer the cluster."
  type        = set(string)
}

variable "public_access_cidrs" {
  description = "Your own network, from which kubectl and helm are run."
  type        = list(string)
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
