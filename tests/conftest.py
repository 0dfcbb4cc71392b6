"""What every test stands on: one torch thread, so that tests beside one another do not wait at barriers.

Without a GPU, Triton kernels run in Triton's interpreter; it must be told before triton is first imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.postgres_server import PostgresServer

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A real server, started when the first test asks for it."""
    # Most tests need none of this.
    from tests.postgres_server import running_postgres

    with running_postgres() as server:
        yield server
