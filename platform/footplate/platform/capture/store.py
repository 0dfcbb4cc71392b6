"""What is kept of a request, and what capture needs of a database. Methods may block; any thread may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from footplate.tenancy.admin.store import Listed, Page


@dataclass(frozen=True, slots=True)
class CaptureRecord:
    """One request, its texts redacted. `id` is the store's; seconds since the request came."""

    request_id: str
    tenant_id: str
    key_id: str
    model: str
    endpoint: str
    why: str
    captured_at: datetime
    expires_at: datetime
    error: str | None = None
    first_token_s: float | None = None
    prompts: Sequence[str] = ()
    answers: Sequence[str] = ()
    # How many of each kind were taken out.
    redacted: Mapping[str, int] = field(default_factory=dict)
    is_cut: bool = False
    id: int = 0

    def head(self) -> dict[str, Any]:
        """All but the texts."""
        return {
            "id": str(self.id),
            "object": "capture",
            "request_id": self.request_id,
            "tenant_id": self.tenant_id,
            "key_id": self.key_id,
            "model": self.model,
            "endpoint": self.endpoint,
            "why": self.why,
            "error": self.error,
            "first_token_s": self.first_token_s,
            "captured_at": _time_text(self.captured_at),
            "expires_at": _time_text(self.expires_at),
            "redacted": dict(self.redacted),
            "is_cut": self.is_cut,
        }

    def fields(self) -> dict[str, Any]:
        """All of it."""
        return {**self.head(), "prompts": list(self.prompts), "answers": list(self.answers)}


@dataclass(frozen=True, slots=True)
class CaptureFilter:
    """Which records a list has: None is any. `begin` is included, `end` is not."""

    tenant_id: str | None = None
    begin: datetime | None = None
    end: datetime | None = None


class CaptureWriter(Protocol):
    """Where records are put, and whence they go again."""

    def add(self, records: Sequence[CaptureRecord]) -> None:
        """Store all of them or none. Raises for a store that can't."""
        ...

    def delete_expired(self, limit: int) -> int:
        """Delete at most so many whose time is over, by the store's clock; how many there were."""
        ...


class CaptureShelf(Protocol):
    """Where they are read and erased; what has expired is not there, deleted or not.

    Methods raise StoreUnavailable.
    """

    def heads(self, page: Page, wanted: CaptureFilter) -> Listed[CaptureRecord]:
        """Records without their texts. Raises InvalidValue for an `after` that can't be an id."""
        ...

    def record(self, record_id: int) -> CaptureRecord | None: ...

    def erase(self, tenant_id: str) -> int:
        """Delete all of a tenant's; how many there were, expired ones too."""
        ...


def _time_text(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
