"""The schema in code and the one that migrations make are the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from footplate.billing.adapters.postgres import schema, tables
from footplate.deployments import migrations
from tests.postgres_server import PostgresServer, connected


def test_the_tables_in_code_are_those_that_the_migrations_make(books_url: str) -> None:
    with connected(books_url) as engine, engine.connect() as connection:
        options = {
            "include_schemas": True,
            "version_table": schema.VERSION_TABLE,
            "version_table_schema": tables.SCHEMA,
            "include_name": lambda name, kind, _: kind != "schema" or name == tables.SCHEMA,
        }
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, tables.metadata) == []


def test_many_who_start_at_once_migrate_once_and_all_can_be_undone(postgres: PostgresServer) -> None:
    with connected(postgres.new_database()) as engine:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: migrations.upgrade(engine, schema), range(4)))
        with engine.begin() as connection:
            assert migrations.version(connection, schema) == "0003"
            configuration = Config()
            configuration.set_main_option("script_location", str(schema.MIGRATIONS))
            configuration.attributes["connection"] = connection
            command.downgrade(configuration, "base")
            left = text(
                "select count(*) from pg_class c join pg_namespace n on n.oid = c.relnamespace "
                "where n.nspname = 'billing' and c.relkind in ('r', 'v', 'S') "
                "and c.relname <> 'schema_version'"
            )
            assert connection.execute(left).scalar() == 0


@pytest.mark.parametrize("change", ["update {0} set {1} = {1}", "delete from {0}", "truncate {0}"])
def test_what_was_written_down_cannot_be_changed(books_url: str, change: str) -> None:
    with connected(books_url) as engine, engine.begin() as connection:
        for table in tables.IMMUTABLE:
            column = list(table.columns)[-1].name
            with pytest.raises(IntegrityError, match="never changed"), connection.begin_nested():
                connection.execute(text(change.format(f"billing.{table.name}", column)))
