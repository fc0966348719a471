"""S3: the botocore client and its options, multipart uploads, parallel transfers, retries and checksums."""
