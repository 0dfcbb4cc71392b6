"""Idempotency keys of requests: the first request under a key is the only one, for a day.

A key is kept as a digest and stands for an event's id: what came of the first request is what its event says.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

from footplate.billing.usage import EventId, EventState, TenantId, TokenCounts

KEPT = timedelta(hours=24)


@dataclass(frozen=True, slots=True)
class FirstRequest:
    """What is known of the first request under a key; no `state` while it runs."""

    event_id: EventId
    state: EventState | None = None
    tokens: TokenCounts = field(default_factory=TokenCounts)


class RequestKeys(Protocol):
    """Which request came first. Methods may block; all raise StoreUnavailable."""

    def claim(self, tenant_id: TenantId, key: str, event_id: EventId) -> FirstRequest | None:
        """None when this request is the first; the first one otherwise. One of several at once is first."""
        ...

    def release(self, tenant_id: TenantId, key: str, event_id: EventId) -> None:
        """The request did not begin: the key is free, if it is this request's."""
        ...


def digest(key: str) -> bytes:
    """What is stored of a key: people write into keys what they should not."""
    return hashlib.sha256(key.encode()).digest()
