"""Brings the database of a run to this version and makes its first keys."""

from __future__ import annotations

from pathlib import Path

from footplate.deployments.errors import StartupError
from footplate.tenancy.bootstrap import create_first_keys
from footplate.tenancy.secrets import MasterKey


def prepare_storage(database_url: str, master_key_file: Path, keys_dir: Path | None) -> None:
    """Run migrations and make sure that the first keys exist; without a folder none are made. Idempotent.

    Raises:
        StartupError: the database can't be reached or used.
    """
    # Loaded here: these imports take a second, and run beside Ray's start.
    from sqlalchemy.exc import SQLAlchemyError

    from footplate.deployments import migrations
    from footplate.deployments.capture import schema as capture_schema
    from footplate.deployments.model_registry import schema as registry_schema
    from footplate.tenancy.adapters.postgres import schema
    from footplate.tenancy.adapters.postgres.store import PostgresKeyStore, connect

    engine = connect(database_url, pool_size=1)
    try:
        migrations.upgrade(engine, schema)
        migrations.upgrade(engine, registry_schema)
        migrations.upgrade(engine, capture_schema)
        if keys_dir is not None:
            create_first_keys(PostgresKeyStore(engine), MasterKey.load(master_key_file), keys_dir)
    except SQLAlchemyError as error:
        cause = str(getattr(error, "orig", None) or type(error).__name__).strip().splitlines()[0]
        raise StartupError(f"the database can't be used: {cause}", "check storage.database_url") from error
    finally:
        engine.dispose()
