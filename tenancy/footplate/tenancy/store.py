"""What tenancy needs from a database, as a protocol. Methods may block; any thread may call them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from footplate.tenancy.api_keys import NewKey, Role, StoredKey


@dataclass(frozen=True, slots=True)
class Tenant:
    """One customer of the platform: a team of the company."""

    id: str
    name: str
    cost_center: str = ""
    share_group: str | None = None
    is_suspended: bool = False
    created_at: datetime | None = None


class KeyStore(Protocol):
    """Tenants and keys. Times are aware, UTC."""

    def find_key(self, public_id: str) -> StoredKey | None:
        """The key of that public id with its tenant's state, live or not."""
        ...

    def find_tenant(self, name: str) -> Tenant | None:
        """The tenant of that name."""
        ...

    def create_tenant(self, name: str, *, cost_center: str = "", share_group: str | None = None) -> Tenant:
        """A new tenant.

        Raises:
            NameTaken: there is one of that name.
        """
        ...

    def add_key(
        self, key: NewKey, tenant_id: str, role: Role, *, name: str = "", expires_at: datetime | None = None
    ) -> None:
        """Store a new key of a tenant. Its text is not looked at.

        Raises:
            NotFound: there is no such tenant.
        """
        ...

    def revoke_key(self, public_id: str, at: datetime) -> None:
        """Make a key open nothing from `at` on; an earlier revocation stays.

        Raises:
            NotFound: there is no such key.
        """
        ...
