"""What administrators do: tenants, keys and quotas changed one by one, each change with its audit record."""
