"""Databases behind the protocols of tenancy; the only place that imports their drivers."""
