"""Alembic's entry: migrations run on the connection that `migrations.upgrade` holds its lock on."""

from alembic import context

from footplate.deployments.capture.schema import SCHEMA, VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    version_table=VERSION_TABLE,
    version_table_schema=SCHEMA,
)
with context.begin_transaction():
    context.run_migrations()
