output "bucket_arn" {
  description = "The bucket, for policies."
  value       = aws_s3_bucket.files.arn
}

output "kms_key_arn" {
  description = "The key of its objects, for policies."
  value       = aws_kms_key.files.arn
}

output "files_url" {
  description = "What storage.files_url is to say."
  value       = "s3://${aws_s3_bucket.files.id}/files"
}
