"""One Valkey for all tests of the limiter that do not hurt it: each has a tenant of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tenancy.limiter.pairs import Pair, local_pair, valkey_pair
from tests.tenancy.limiter.valkey_server import ValkeyServer, running_valkey


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    with running_valkey() as server:
        yield server
        # Nothing that any test wrote may stay for good.
        left = server.ask("KEYS", "footplate:*")
        assert isinstance(left, list)
        assert [key for key in left if server.ask("PTTL", key) == -1] == []


@pytest.fixture(params=["valkey", "local"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Every promise of the protocol is held by both limiters."""
    if request.param == "local":
        with local_pair() as made:
            yield made
        return
    server: ValkeyServer = request.getfixturevalue("valkey")
    with valkey_pair(server.url) as made:
        yield made
