variable "bucket_name" {
  description = "Name of the bucket of files and batches."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.bucket_name))
    error_message = "bucket_name must be 3 to 63 lower-case letters, digits and hyphens."
  }
}

variable "expire_after_days" {
  description = "Days after which files are deleted; null keeps them until their owner deletes them."
  type        = number
  default     = null

  validation {
    # A batch may take 24 hours, and finished lines are read from the store until it ends.
    condition     = var.expire_after_days == null ? true : var.expire_after_days >= 7
    error_message = "expire_after_days must be at least 7: a running batch would lose its lines."
  }
}

variable "is_protected" {
  description = "Refuse to delete the bucket while it holds anything."
  type        = bool
  default     = true
}

variable "tags" {
  description = "Tags of every resource."
  type        = map(string)
  default     = {}
}
