"""Where the migrations of files and batches lie; `footplate.deployments.migrations` runs them."""

from __future__ import annotations

from pathlib import Path

SCHEMA = "batches"
VERSION_TABLE = "schema_version"
MIGRATIONS = Path(__file__).parent / "migrations"
LOCK_ID = 0x66706261
