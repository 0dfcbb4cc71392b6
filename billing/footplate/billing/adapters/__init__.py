"""Databases behind the protocols of billing; the only place that imports their drivers."""
