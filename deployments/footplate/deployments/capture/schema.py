"""Where the migrations of kept content lie; `footplate.deployments.migrations` runs them."""

from __future__ import annotations

from pathlib import Path

SCHEMA = "capture"
VERSION_TABLE = "schema_version"
MIGRATIONS = Path(__file__).parent / "migrations"
LOCK_ID = 0x66706361
