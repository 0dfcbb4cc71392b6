"""Brings a component's schema in PostgreSQL to the version of this code."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, inspect, text


class ComponentSchema(Protocol):
    """What a component's module `schema` says of its tables. `LOCK_ID`: any number, each its own."""

    SCHEMA: str
    VERSION_TABLE: str
    LOCK_ID: int
    MIGRATIONS: Path


def upgrade(engine: Engine, of: ComponentSchema) -> None:
    """Run the migrations that are missing. Safe to call from many processes at once."""
    with engine.begin() as connection:
        # Requests may not take long; changing a large table may, and so may waiting for who changes it.
        connection.execute(text("set local statement_timeout = 0"))
        # One migrator at a time.
        connection.execute(text("select pg_advisory_xact_lock(:id)"), {"id": of.LOCK_ID})
        connection.execute(text(f"create schema if not exists {of.SCHEMA}"))
        configuration = Config()
        configuration.set_main_option("script_location", str(of.MIGRATIONS))
        configuration.attributes["connection"] = connection
        command.upgrade(configuration, "head")


def version(connection: Connection, of: ComponentSchema) -> str | None:
    """The version the schema stands at; None before the first migration."""
    if not inspect(connection).has_table(of.VERSION_TABLE, schema=of.SCHEMA):
        return None
    query = text(f"select version_num from {of.SCHEMA}.{of.VERSION_TABLE}")
    found: str | None = connection.execute(query).scalar()
    return found
