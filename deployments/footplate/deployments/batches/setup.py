"""Brings the stores of files and batches of a run to this version."""

from __future__ import annotations

from pathlib import Path

from footplate.deployments.errors import StartupError


def prepare_batches(database_url: str, files_url: str, data_dir: Path) -> None:
    """Run migrations, and see that the store of files can be opened and takes something. Idempotent.

    Raises:
        StartupError: one of the two can't be used.
    """
    # Loaded here: these imports take a while, and run beside Ray's start.
    from sqlalchemy.exc import SQLAlchemyError

    from footplate.billing.adapters.postgres.books import connect
    from footplate.deployments import migrations
    from footplate.deployments.batches import schema
    from footplate.deployments.batches.byte_store import open_byte_store
    from footplate.platform.errors import FileStoreAway

    engine = connect(database_url, pool_size=1)
    try:
        migrations.upgrade(engine, schema)
    except SQLAlchemyError as error:
        cause = str(getattr(error, "orig", None) or type(error).__name__).strip().splitlines()[0]
        raise StartupError(f"the database can't be used: {cause}", "check storage.database_url") from error
    finally:
        engine.dispose()
    # A URL may hold secrets: only its kind is named.
    kind = files_url.partition("://")[0] if "://" in files_url else "file"
    try:
        store = open_byte_store(files_url, data_dir)
        store.put(".footplate", b"")
        store.delete(".footplate")
    except (ValueError, ImportError) as error:
        mend = "install fsspec's package for them (s3fs, gcsfs, adlfs), or set storage.files_url"
        raise StartupError(f"storage.files_url: {kind} URLs can't be opened here", mend) from error
    except FileStoreAway as error:
        raise StartupError(
            f"the store of files ({kind}) takes nothing: {error}",
            "check storage.files_url and its credentials",
        ) from error
