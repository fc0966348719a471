"""Object storage: the object tier over any fsspec URL, with our own client for S3."""
