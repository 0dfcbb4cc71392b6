"""What administration needs from a database, as protocols. Methods may block; any thread may call them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, Protocol, TypeVar

from footplate.tenancy.admin.audit import AuditRecord
from footplate.tenancy.api_keys import KeyRecord
from footplate.tenancy.errors import InvalidValue
from footplate.tenancy.tenants import Tenant

MAX_LIMIT = 1000
DEFAULT_LIMIT = 100
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list: at most `limit` rows after the row of id `after`, oldest first."""

    limit: int = DEFAULT_LIMIT
    after: str | None = None
    is_newest_first: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.limit <= MAX_LIMIT:
            raise InvalidValue(f"limit is {self.limit}; it must be from 1 to {MAX_LIMIT}", "limit")


@dataclass(frozen=True, slots=True)
class Listed(Generic[_Item]):
    """A page of a list, and whether rows follow it."""

    items: Sequence[_Item]
    has_more: bool


@dataclass(frozen=True, slots=True)
class RememberedAnswer:
    """What a request with an Idempotency-Key was answered, and a hash of what it asked."""

    request_hash: bytes
    answer: Mapping[str, Any]


class Reader(Protocol):
    """Reads of one moment or later. Lists raise InvalidValue for an `after` that names no row."""

    def tenant(self, tenant_id: str) -> Tenant | None: ...

    def tenants(
        self, page: Page, *, only_id: str | None = None, name: str | None = None
    ) -> Listed[Tenant]: ...

    def key(self, public_id: str) -> KeyRecord | None: ...

    def replacement(self, key: KeyRecord) -> KeyRecord | None:
        """The key that one was rotated into; always of the same tenant."""
        ...

    def count_live_keys(self, tenant_id: str, now: datetime) -> int: ...

    def keys(self, tenant_id: str, page: Page) -> Listed[KeyRecord]: ...

    def records(
        self, page: Page, *, tenant_id: str | None = None, target_id: str | None = None
    ) -> Listed[AuditRecord]: ...


class Writer(Reader, Protocol):
    """One transaction, alone among all writers: what it reads does not change before it ends."""

    def add_tenant(self, tenant: Tenant) -> Tenant:
        """Store a new tenant under an id of the store's; raises NameTaken."""
        ...

    def save_tenant(self, tenant: Tenant) -> None:
        """Store all of a tenant but its id; raises NameTaken."""
        ...

    def add_key(self, key: KeyRecord, hashed: bytes) -> KeyRecord: ...

    def save_key(self, key: KeyRecord) -> None:
        """Store a key's quota, expiry and revocation; the rest never changes."""
        ...

    def record(self, record: AuditRecord) -> None: ...

    @property
    def recorded(self) -> Sequence[AuditRecord]:
        """What `record` was given so far."""
        ...

    def recall(self, caller_key_id: str, idempotency_key: str) -> RememberedAnswer | None: ...

    def remember(self, caller_key_id: str, idempotency_key: str, answer: RememberedAnswer) -> None: ...


class AdminStore(Protocol):
    """Where tenants, keys and records lie. Both raise StoreUnavailable."""

    def reading(self) -> AbstractContextManager[Reader]: ...

    def writing(self, within: object | None = None) -> AbstractContextManager[Writer]:
        """A transaction; it commits when the block ends, unless by an exception.

        `within`: the connection of another store's transaction on the same database. All is written in that
        one, and its owner commits.
        """
        ...
