"""What authentication needs from a database, as a protocol. Methods may block; any thread may call them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Protocol

from footplate.tenancy.api_keys import NewKey, Role, StoredKey
from footplate.tenancy.tenants import Tenant


class KeyReader(Protocol):
    """What a request needs."""

    def find_key(self, public_id: str) -> StoredKey | None:
        """The key of that public id with its tenant's state, live or not. Raises StoreUnavailable."""
        ...


class KeyStore(KeyReader, Protocol):
    """Keys, and what the first start makes. Times are aware, UTC. All raise StoreUnavailable.

    Whatever changes later goes through `footplate.tenancy.admin`, which also writes it down.
    """

    def note_uses(self, uses: Mapping[str, datetime]) -> None:
        """When keys were last used, by their public id; an earlier time than the one known is ignored."""
        ...

    def find_tenant(self, name: str) -> Tenant | None:
        """The tenant of that name."""
        ...

    def create_tenant(self, name: str) -> Tenant:
        """A new tenant.

        Raises:
            NameTaken: there is one of that name.
        """
        ...

    def add_key(self, key: NewKey, tenant_id: str, role: Role, *, name: str = "") -> None:
        """Store a new key of a tenant. Its text is not looked at.

        Raises:
            NotFound: there is no such tenant.
        """
        ...
