"""Which reservations are held in Valkey, over all tenants: for who compares them with what was written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from footplate.tenancy.errors import LimiterUnavailable
from footplate.tenancy.limiter.reservations import HeldReservations

_PAGE = 1_000


class ValkeyHeldReservations:
    """Blocks; any thread may call it. It changes nothing: leases that are over are left to who sweeps."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 2.0,
        key_prefix: str = "footplate:limits",
        clock_offset_ms: int = 0,
    ) -> None:
        """`timeout_s`: of a connection and of each answer. `clock_offset_ms` is for tests alone."""
        self._url = url
        self._timeout_s = timeout_s
        self._key_prefix = key_prefix
        self._clock_offset_ms = clock_offset_ms

    def read(self) -> HeldReservations:
        """As of now; what begins or ends meanwhile may be in it or not.

        Raises:
            LimiterUnavailable: the store can't be asked, or a value there is damaged.
        """
        client = Redis.from_url(
            self._url,
            socket_timeout=self._timeout_s,
            socket_connect_timeout=self._timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
        try:
            return self._read(client)
        except (RedisError, OSError, TimeoutError) as error:
            raise LimiterUnavailable(
                f"the store of the limits can't be asked: {type(error).__name__}"
            ) from error
        finally:
            client.close()

    def _read(self, client: Any) -> HeldReservations:
        seconds, micros = client.time()
        now_ms = seconds * 1_000 + micros // 1_000 + self._clock_offset_ms
        held: set[str] = set()
        lost: set[str] = set()
        for tenant in client.zrange(f"{self._key_prefix}:tenants", 0, -1):
            base = f"{self._key_prefix}:{{{quote(tenant.decode(), safe='')}}}"
            for name, end_ms in _pages(client, f"{base}:leases"):
                (held if end_ms > now_ms else lost).add(name)
            lost |= {name.decode() for name, _ in client.hscan_iter(f"{base}:lost", count=_PAGE)}
        return HeldReservations(frozenset(held), frozenset(lost))


def _pages(client: Any, key: str) -> Iterator[tuple[str, float]]:
    for name, score in client.zscan_iter(key, count=_PAGE):
        yield name.decode(), score
