"""Alembic's entry: migrations run on the connection that `migrations.upgrade` holds its lock on."""

from alembic import context

from footplate.tenancy.adapters.postgres.schema import VERSION_TABLE
from footplate.tenancy.adapters.postgres.tables import SCHEMA, metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    version_table_schema=SCHEMA,
)
with context.begin_transaction():
    context.run_migrations()
