"""Brings the schema of files and batches to the version of this code."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, text

SCHEMA = "batches"
VERSION_TABLE = "schema_version"
_MIGRATIONS = Path(__file__).parent / "migrations"
# Any number, as long as each component has its own: one migrator at a time.
_LOCK_ID = 0x66706261


def upgrade(engine: Engine) -> None:
    """Run the migrations that are missing. Safe to call from many processes at once."""
    with engine.begin() as connection:
        # Requests may not take long; changing a large table may, and so may waiting for who changes it.
        connection.execute(text("set local statement_timeout = 0"))
        connection.execute(text("select pg_advisory_xact_lock(:id)"), {"id": _LOCK_ID})
        connection.execute(text(f"create schema if not exists {SCHEMA}"))
        configuration = Config()
        configuration.set_main_option("script_location", str(_MIGRATIONS))
        configuration.attributes["connection"] = connection
        command.upgrade(configuration, "head")
