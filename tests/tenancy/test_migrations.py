"""The schema grows under rows that are there and beside gateways of the version before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Engine, text

from footplate.deployments import migrations
from footplate.tenancy.adapters.postgres import schema, tables
from footplate.tenancy.adapters.postgres.admin_store import PostgresAdminStore
from footplate.tenancy.adapters.postgres.store import PostgresKeyStore
from footplate.tenancy.admin.store import Page
from footplate.tenancy.api_keys import Role, hash_secret
from tests.postgres_server import PostgresServer, connected

# What the version before writes and reads.
OLD_TENANT = "insert into tenancy.tenants (id, name, cost_center, share_group) values (:id, :name, '42', 'g')"
OLD_KEY = (
    "insert into tenancy.api_keys (public_id, hashed, role, tenant_id, name) "
    "values (:id, :hashed, 'member', :tenant, 'old')"
)


def move(engine: Engine, revision: str) -> None:
    """To a revision, whichever way it lies."""
    configuration = Config()
    configuration.set_main_option("script_location", str(schema.MIGRATIONS))
    with engine.begin() as connection:
        connection.execute(text(f"create schema if not exists {tables.SCHEMA}"))
        configuration.attributes["connection"] = connection
        is_back = revision == "0001" and migrations.version(connection, schema) is not None
        (command.downgrade if is_back else command.upgrade)(configuration, revision)


def insert_old(engine: Engine, number: int) -> None:
    hashed = hash_secret(b"pepper", f"{number:012d}", "s")
    with engine.begin() as connection:
        connection.execute(text(OLD_TENANT), {"id": f"tnt_{number:016x}", "name": f"t{number}"})
        key = {"id": f"{number:012d}", "hashed": hashed, "tenant": f"tnt_{number:016x}"}
        connection.execute(text(OLD_KEY), key)


def test_rows_of_the_version_before_are_kept_and_it_goes_on_writing(postgres: PostgresServer) -> None:
    with connected(postgres.new_database()) as engine:
        move(engine, "0001")
        for number in range(3):
            insert_old(engine, number)
        migrations.upgrade(engine, schema)
        insert_old(engine, 3)
        with PostgresAdminStore(engine).reading() as reader:
            tenants = reader.tenants(Page()).items
            assert [tenant.name for tenant in tenants] == ["t0", "t1", "t2", "t3"]
            assert {(t.cost_center, t.share_group, t.quota, len(t.labels)) for t in tenants} == {
                ("42", "g", None, 0)
            }
            keys = [key for tenant in tenants for key in reader.keys(tenant.id, Page()).items]
            assert [key.public_id for key in keys] == [f"{number:012d}" for number in range(4)]
        stored = PostgresKeyStore(engine).find_key(f"{1:012d}")
        assert stored is not None
        assert (stored.role, stored.hashed) == (Role.MEMBER, hash_secret(b"pepper", f"{1:012d}", "s"))
        move(engine, "0001")
        insert_old(engine, 4)
        migrations.upgrade(engine, schema)
        with PostgresAdminStore(engine).reading() as reader:
            assert len(reader.tenants(Page()).items) == 5


def test_the_tables_in_code_are_those_that_the_migrations_make(postgres: PostgresServer) -> None:
    with connected(postgres.new_database(is_migrated=True)) as engine, engine.connect() as connection:
        options = {
            "include_schemas": True,
            "version_table": schema.VERSION_TABLE,
            "version_table_schema": tables.SCHEMA,
            # Other components keep schemas of their own beside it.
            "include_name": lambda name, kind, _: kind != "schema" or name == tables.SCHEMA,
        }
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, tables.metadata) == []


def test_many_who_start_at_once_migrate_once(postgres: PostgresServer) -> None:
    with connected(postgres.new_database()) as engine, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: migrations.upgrade(engine, schema), range(4)))
        with engine.connect() as connection:
            assert migrations.version(connection, schema) == "0004"
