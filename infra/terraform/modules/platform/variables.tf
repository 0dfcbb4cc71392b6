variable "name" {
  description = "Prefix of names."
  type        = string
}

variable "cluster_name" {
  description = "EKS cluster that Footplate runs in."
  type        = string
}

variable "namespace" {
  description = "Kubernetes namespace of the release."
  type        = string
  default     = "footplate"
}

variable "service_account" {
  description = "Service account of the chart's pods."
  type        = string
  default     = "footplate"
}

variable "files" {
  description = "Outputs of the module storage: where files and batches lie."
  type        = object({ bucket_arn = string, kms_key_arn = string, files_url = string })
}

variable "postgres" {
  description = "Outputs of the module postgres."
  type        = object({ host = string, port = number, database = string, user = string, password_secret_arn = string })
}

variable "limits_valkey" {
  description = "Outputs of the module valkey with the purpose limits."
  type        = object({ host = string, port = number })
}

variable "ray_valkey" {
  description = "Outputs of the module valkey with the purpose ray."
  type        = object({ host = string, port = number })
}

variable "image" {
  description = "Repository and tag of the image made from infra/docker/Dockerfile."
  type        = object({ repository = string, tag = string })

  validation {
    condition     = var.image.tag != "latest" && var.image.tag != ""
    error_message = "image.tag must name one version: what latest means changes between two pods."
  }
}

variable "tags" {
  description = "Tags of every resource."
  type        = map(string)
  default     = {}
}
