"""Brings the schema of billing to the version of this code."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, inspect, text

from footplate.billing.adapters.postgres.tables import SCHEMA

VERSION_TABLE = "schema_version"
_MIGRATIONS = Path(__file__).parent / "migrations"
# Any number, as long as each component has its own: one migrator at a time.
_LOCK_ID = 0x66706274


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


def version(connection: Connection) -> str | None:
    """The version the schema stands at; None before the first migration."""
    if not inspect(connection).has_table(VERSION_TABLE, schema=SCHEMA):
        return None
    found: str | None = connection.execute(text(f"select version_num from {SCHEMA}.{VERSION_TABLE}")).scalar()
    return found
