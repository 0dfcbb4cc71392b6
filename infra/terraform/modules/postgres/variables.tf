variable "name" {
  description = "Identifier of the instance."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,50}$", var.name))
    error_message = "name must be 2 to 51 lower-case letters, digits and hyphens, and begin with a letter."
  }
}

variable "vpc_id" {
  description = "VPC of the instance."
  type        = string
}

variable "subnet_ids" {
  description = "Private subnets in at least two zones."
  type        = list(string)

  validation {
    condition     = length(var.subnet_ids) >= 2
    error_message = "RDS wants subnets in at least two zones."
  }
}

variable "client_security_group_ids" {
  description = "Security groups that may connect, by a name of yours: those of the nodes."
  type        = map(string)
}

variable "engine_version" {
  description = "Version of PostgreSQL; the embedded one, that tests run on, is 18."
  type        = string
  default     = "18"

  validation {
    condition     = can(tonumber(split(".", var.engine_version)[0])) && tonumber(split(".", var.engine_version)[0]) >= 16
    error_message = "engine_version must be 16 or later."
  }
}

variable "instance_class" {
  description = "Class of the instance."
  type        = string
  default     = "db.r7g.large"
}

variable "storage_gib" {
  description = "Storage at the start."
  type        = number
  default     = 100
}

variable "max_storage_gib" {
  description = "Up to where storage grows by itself."
  type        = number
  default     = 1000

  validation {
    condition     = var.max_storage_gib > var.storage_gib
    error_message = "max_storage_gib must be above storage_gib."
  }
}

variable "multi_az" {
  description = "A standby in another zone. The ledger is the truth of billing: leave it on where money is owed."
  type        = bool
  default     = true
}

variable "backup_retention_days" {
  description = "Days of point-in-time recovery."
  type        = number
  default     = 14

  validation {
    condition     = var.backup_retention_days >= 1 && var.backup_retention_days <= 35
    error_message = "backup_retention_days must be 1 to 35: a ledger without backups is none."
  }
}

variable "is_protected" {
  description = "Refuse deletion, and take a last snapshot when it is allowed."
  type        = bool
  default     = true
}

variable "max_connections" {
  description = "Connections. A gateway opens at most 29."
  type        = number
  default     = 400
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
