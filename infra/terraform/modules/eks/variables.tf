variable "name" {
  description = "Name of the cluster and prefix of what belongs to it."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,30}$", var.name))
    error_message = "name must be 2 to 31 lower-case letters, digits and hyphens, and begin with a letter."
  }
}

variable "kubernetes_version" {
  description = "Minor version of Kubernetes."
  type        = string
  default     = "1.33"

  validation {
    condition     = can(regex("^1\\.(3[0-9])$", var.kubernetes_version))
    error_message = "kubernetes_version must be a minor version from 1.30 on, such as 1.33."
  }
}

variable "vpc_id" {
  description = "VPC of the cluster."
  type        = string
}

variable "subnet_ids" {
  description = "Private subnets of nodes and of the control plane's interfaces, in at least two zones."
  type        = list(string)

  validation {
    condition     = length(var.subnet_ids) >= 2
    error_message = "EKS wants subnets in at least two zones."
  }
}

variable "public_access_cidrs" {
  description = "Addresses that may reach the API server from outside the VPC; empty closes it to the outside."
  type        = list(string)
  default     = []

  validation {
    condition     = !contains(var.public_access_cidrs, "0.0.0.0/0")
    error_message = "The API server must not be open to the whole internet: name the networks of your administrators."
  }
}

variable "admin_principal_arns" {
  description = "IAM roles or users that administer the cluster."
  type        = set(string)
  default     = []
}

variable "node_groups" {
  description = "Groups of nodes without GPU. One of them carries the label footplate.io/role=system: operators, collectors, Ray heads."
  type = map(object({
    instance_types = list(string)
    min_size       = number
    max_size       = number
    desired_size   = number
    disk_gib       = optional(number, 100)
    capacity_type  = optional(string, "ON_DEMAND")
    labels         = optional(map(string), {})
  }))

  validation {
    condition     = alltrue([for group in values(var.node_groups) : group.min_size <= group.desired_size && group.desired_size <= group.max_size])
    error_message = "Each node group wants min_size <= desired_size <= max_size."
  }
  validation {
    condition     = alltrue([for group in values(var.node_groups) : contains(["ON_DEMAND", "SPOT"], group.capacity_type)])
    error_message = "capacity_type is ON_DEMAND or SPOT."
  }
}

variable "gpu_node_groups" {
  description = "Groups of nodes with NVIDIA GPUs; they are tainted, so that only engines come there."
  type = map(object({
    instance_types = list(string)
    min_size       = number
    max_size       = number
    desired_size   = number
    disk_gib       = optional(number, 300)
    capacity_type  = optional(string, "ON_DEMAND")
    subnet_ids     = optional(list(string)) # GPUs are often to be had in one zone only
    labels         = optional(map(string), {})
  }))
  default = {}

  validation {
    condition     = alltrue([for group in values(var.gpu_node_groups) : group.min_size <= group.desired_size && group.desired_size <= group.max_size])
    error_message = "Each node group wants min_size <= desired_size <= max_size."
  }
  validation {
    condition     = alltrue(flatten([for group in values(var.gpu_node_groups) : [for type in group.instance_types : can(regex("^(g[4-9]|p[3-9])", type))]]))
    error_message = "GPU groups take instance types with NVIDIA GPUs (g4 and later, p3 and later)."
  }
}

variable "log_retention_days" {
  description = "How long the control plane's logs are kept."
  type        = number
  default     = 90
}

variable "tags" {
  description = "Tags of every resource."
  type        = map(string)
  default     = {}
}
