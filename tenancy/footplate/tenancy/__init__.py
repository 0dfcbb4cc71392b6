"""Tenants, API keys, quotas and the token limiter."""
