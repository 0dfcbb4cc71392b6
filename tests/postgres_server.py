"""One real PostgreSQL for a test session, and a database of its own for each test that asks."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import Engine, text

from footplate.billing.adapters.postgres import schema as billing_schema
from footplate.deployments import migrations
from footplate.deployments.capture import schema as capture_schema
from footplate.deployments.embedded import EmbeddedPostgres
from footplate.deployments.leftovers import postmaster_pid
from footplate.deployments.model_registry import schema as registry_schema
from footplate.deployments.run_paths import RunPaths
from footplate.tenancy.adapters.postgres import schema
from footplate.tenancy.adapters.postgres.store import connect


@dataclass
class PostgresServer:
    """A running server."""

    server: EmbeddedPostgres
    data_dir: Path
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _template: str | None = None

    @property
    def url(self) -> str:
        """Of the server's own first database."""
        return self.server.url

    def pids(self) -> list[int]:
        """The server's process and its children, one for each connection among them."""
        main = postmaster_pid(self.data_dir)
        assert main is not None
        children = Path(f"/proc/{main}/task/{main}/children").read_text().split()
        return [main, *map(int, children)]

    def new_database(self, *, is_migrated: bool = False) -> str:
        """The URL of a new database: empty, or with our schema in it."""
        name = f"test_{next(self._numbers)}"
        if not is_migrated:
            return self._create(name)
        if self._template is None:
            # Copying a database takes a tenth of the time of migrating one.
            with connected(self._create("template_ours")) as engine:
                for each in (schema, billing_schema, registry_schema, capture_schema):
                    migrations.upgrade(engine, each)
            self._template = "template_ours"
        return self._create(name, f" template {self._template}")

    def _create(self, name: str, options: str = "") -> str:
        with (
            connected(self.url) as engine,
            engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        ):
            connection.execute(text(f"create database {name}{options}"))
        return self.url.replace("@/postgres?", f"@/{name}?")


@contextlib.contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """A server in a folder of its own; gone afterwards."""
    # Not pytest's folder: the account that PostgreSQL runs as must be able to pass through it.
    with tempfile.TemporaryDirectory(prefix="postgres-") as folder:
        paths = RunPaths.of(Path(folder) / "data")
        paths.make()
        server = EmbeddedPostgres(paths)
        try:
            server.start()
            with connected(server.url) as engine:
                # Nothing here has to outlive the machine, and a hundred databases take long to sync.
                with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                    connection.execute(text("alter system set fsync = off"))
                    connection.execute(text("select pg_reload_conf()"))
            yield PostgresServer(server, paths.postgres_dir)
        finally:
            server.stop()
            for left in sorted(paths.run_dir.rglob("*"), reverse=True):
                left.rmdir() if left.is_dir() else left.unlink()
            paths.run_dir.rmdir()


@contextlib.contextmanager
def connected(url: str) -> Iterator[Engine]:
    """A pool on a database."""
    engine = connect(url)
    try:
        yield engine
    finally:
        engine.dispose()
