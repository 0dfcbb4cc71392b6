variable "name" {
  description = "Name of the replication group."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,39}$", var.name)) && !endswith(var.name, "-")
    error_message = "name must be at most 40 lower-case letters, digits and hyphens, begin with a letter and not end with a hyphen."
  }
}

variable "purpose" {
  description = "limits: counters and reservations of gateways. ray: the state of Ray's control store. Each wants a group of its own."
  type        = string

  validation {
    condition     = contains(["limits", "ray"], var.purpose)
    error_message = "purpose is limits or ray."
  }
}

variable "vpc_id" {
  description = "VPC of the group."
  type        = string
}

variable "subnet_ids" {
  description = "Private subnets."
  type        = list(string)
}

variable "client_security_group_ids" {
  description = "Security groups that may connect, by a name of yours: those of the nodes."
  type        = map(string)
}

variable "auth_token" {
  description = "Password of clients. It stands in the state: keep that encrypted, and pass this as TF_VAR_… from a secret store."
  type        = string
  sensitive   = true

  validation {
    # Also letters that need no escaping in a URL.
    condition     = can(regex("^[A-Za-z0-9_-]{32,128}$", var.auth_token))
    error_message = "auth_token must be 32 to 128 letters, digits, underscores and hyphens."
  }
}

variable "engine_version" {
  description = "Version of Valkey."
  type        = string
  default     = "8.0"
}

variable "node_type" {
  description = "Class of the nodes."
  type        = string
  default     = "cache.r7g.large"
}

variable "num_nodes" {
  description = "Nodes: a primary and its replicas. From two on a replica takes over when the primary dies."
  type        = number
  default     = 2

  validation {
    condition     = var.num_nodes >= 1 && var.num_nodes <= 6
    error_message = "num_nodes must be 1 to 6."
  }
}

variable "snapshot_retention_days" {
  description = "Days that snapshots are kept; 0 makes none."
  type        = number
  default     = 1
}

variable "kms_key_arn" {
  description = "Key that encrypts it at rest; null takes AWS's own."
  type        = string
  default     = null
}

variable "tags" {
  description = "Tags of every resource."
  type        = map(string)
  default     = {}
}
