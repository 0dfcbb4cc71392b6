"""Files and batches on PostgreSQL and any fsspec file system."""
