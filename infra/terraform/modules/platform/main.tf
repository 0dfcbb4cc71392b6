# What pods may do in AWS, where their secrets lie, and the values that the chart needs from the cloud.
# The chart itself is installed with helm: a provider that must log in to a cluster made in the same run is a trap.

resource "aws_iam_role" "pods" {
  name = "${var.name}-pods"
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Principal = { Service = "pods.eks.amazonaws.com" }
      Action    = ["sts:AssumeRole", "sts:TagSession"]
    }]
  })
  tags = var.tags
}

resource "aws_iam_role_policy" "files" {
  name = "files"
  role = aws_iam_role.pods.id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid      = "Objects"
        Effect   = "Allow"
        Action   = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
        Resource = "${var.files.bucket_arn}/files/*"
      },
      {
        Sid      = "List"
        Effect   = "Allow"
        Action   = ["s3:ListBucket"]
        Resource = var.files.bucket_arn
      },
      {
        Sid      = "Key"
        Effect   = "Allow"
        Action   = ["kms:Decrypt", "kms:GenerateDataKey"]
        Resource = var.files.kms_key_arn
      },
    ]
  })
}

resource "aws_eks_pod_identity_association" "pods" {
  cluster_name    = var.cluster_name
  namespace       = var.namespace
  service_account = var.service_account
  role_arn        = aws_iam_role.pods.arn
  tags            = var.tags
}

# Holders only: values are put there by people or by rotation, so that no state has them.
resource "aws_secretsmanager_secret" "this" {
  for_each = {
    master-key      = "Footplate's master key, fpmk:1:<64 hex digits>. Lost, all API keys are."
    limits-password = "Password of the Valkey of limits."
    ray-password    = "Password of the Valkey of Ray's control store."
  }
  name                    = "${var.name}/${each.key}"
  description             = each.value
  recovery_window_in_days = 30
  tags                    = var.tags
}
