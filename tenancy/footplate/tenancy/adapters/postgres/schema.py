"""Where the migrations of tenancy's tables lie; `footplate.deployments.migrations` runs them."""

from __future__ import annotations

from pathlib import Path

from footplate.tenancy.adapters.postgres.tables import SCHEMA

__all__ = ["LOCK_ID", "MIGRATIONS", "SCHEMA", "VERSION_TABLE"]

VERSION_TABLE = "schema_version"
MIGRATIONS = Path(__file__).parent / "migrations"
LOCK_ID = 0x66705F74
