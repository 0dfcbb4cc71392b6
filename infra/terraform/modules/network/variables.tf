variable "name" {
  description = "Prefix of every name, and the value of the tag Name."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,30}$", var.name))
    error_message = "name must be 2 to 31 lower-case letters, digits and hyphens, and begin with a letter."
  }
}

variable "cidr" {
  description = "Addresses of the VPC. A /16 leaves room for one address per pod."
  type        = string
  default     = "10.40.0.0/16"

  validation {
    condition     = can(cidrhost(var.cidr, 0)) && tonumber(split("/", var.cidr)[1]) >= 16 && tonumber(split("/", var.cidr)[1]) <= 20
    error_message = "cidr must be an IPv4 block between /16 and /20: smaller ones run out of pod addresses."
  }
}

variable "availability_zones" {
  description = "Zones to spread over. EKS, RDS and ElastiCache want at least two."
  type        = list(string)

  validation {
    condition     = length(var.availability_zones) >= 2 && length(var.availability_zones) <= 4 && length(distinct(var.availability_zones)) == length(var.availability_zones)
    error_message = "availability_zones must name two to four different zones."
  }
}

variable "nat_per_zone" {
  description = "One NAT gateway in each zone (true), or one for all: cheaper, and gone with its zone."
  type        = bool
  default     = true
}

variable "interface_endpoints" {
  description = "AWS services that are reached without leaving the VPC."
  type        = set(string)
  default     = ["ecr.api", "ecr.dkr", "sts", "secretsmanager", "logs"]
}

variable "flow_log_bucket_arn" {
  description = "Bucket that gets the VPC's flow logs; null keeps none."
  type        = string
  default     = null
}

variable "tags" {
  description = "Tags of every resource."
  type        = map(string)
  default     = {}
}
