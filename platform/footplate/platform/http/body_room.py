"""How much of all requests' bodies a gateway holds in memory at once. Pure; one event loop owns it."""

from __future__ import annotations

from collections import Counter

from footplate.platform.errors import NoRoomForBody


class BodyRoom:
    """Bytes by tenant. One tenant gets half of the room at most, so that none fills it for all."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._of_tenant: Counter[str] = Counter()

    def take(self, tenant_id: str, num_bytes: int) -> None:
        """Hold so many bytes more.

        Raises:
            NoRoomForBody: they are not held.
        """
        if self._of_tenant[tenant_id] + num_bytes > self._max_bytes // 2:
            raise NoRoomForBody(
                f"This tenant's requests hold {self._max_bytes // 2} bytes of bodies, as many as they may; "
                "send fewer large ones at a time."
            )
        if self._num_bytes + num_bytes > self._max_bytes:
            raise NoRoomForBody(f"All requests hold {self._max_bytes} bytes of bodies; try again.")
        self._num_bytes += num_bytes
        self._of_tenant[tenant_id] += num_bytes

    def give_back(self, tenant_id: str, num_bytes: int) -> None:
        """Their request is over."""
        self._num_bytes -= num_bytes
        self._of_tenant[tenant_id] -= num_bytes
        if self._of_tenant[tenant_id] <= 0:
            del self._of_tenant[tenant_id]
