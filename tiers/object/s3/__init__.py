"""S3: client, connections, signed requests, multipart uploads, parallel transfers, retries and checksums."""
