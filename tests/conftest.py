"""What every test stands on: one torch thread, so that tests beside one another do not wait at barriers.

Without a GPU, Triton kernels run in Triton's interpreter; it must be told before triton is first imported.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.postgres_server import PostgresServer

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What a worker of `pytest -n` takes at once: a file, or all that share a platform or one Ray stack."""
    from xdist.scheduler import LoadScopeScheduling

    class ByPlatform(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            folder, _, name = file.rpartition("/")
            is_shared = folder in ("tests/e2e", "tests/ray") and name != "test_lifecycle.py"
            return folder if is_shared else file

    return ByPlatform(config, log)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A real server, started when the first test asks for it."""
    # Most tests need none of this.
    from tests.postgres_server import running_postgres

    with running_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def new_books(postgres: PostgresServer) -> Callable[[], str]:
    """Makes a database with empty books and no batches; answers with its URL.

    Copying one is faster than migrating.
    """
    from sqlalchemy import text

    from footplate.billing.adapters.postgres import schema
    from footplate.deployments import migrations
    from footplate.deployments.batches import schema as batch_schema
    from tests.postgres_server import connected

    template = postgres.new_database()
    with connected(template) as engine:
        migrations.upgrade(engine, schema)
        migrations.upgrade(engine, batch_schema)
    numbers = itertools.count()

    def make() -> str:
        name = f"books_{next(numbers)}"
        source = template.rsplit("@/", 1)[1].split("?")[0]
        with (
            connected(postgres.url) as engine,
            engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        ):
            connection.execute(text(f"create database {name} template {source}"))
        return postgres.url.replace("@/postgres?", f"@/{name}?")

    return make
