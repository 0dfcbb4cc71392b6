"""API keys: their form, their keyed hash, and who a key stands for. Pure.

A key reads `fp_<public id>_<secret>`, both parts base62. The public id finds the row; the secret is only ever
compared through its HMAC-SHA256 under the pepper, so a copy of the table opens nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from footplate.tenancy.quotas import Quota

BASE62 = string.digits + string.ascii_letters
PUBLIC_ID_CHARS = 12
SECRET_CHARS = 32  # 190 bits
_PREFIX = "fp"
LOOKS_LIKE_A_KEY = re.compile(r"fp_[0-9A-Za-z]{12}_[0-9A-Za-z]{32}")


class Role(StrEnum):
    """What a key may do; deny by default."""

    PLATFORM_ADMIN = "platform_admin"
    FINANCE = "finance"
    AUDITOR = "auditor"
    TENANT_ADMIN = "tenant_admin"
    MEMBER = "member"  # inference only
    SCRAPE = "scrape"  # metrics only


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key that was just made. `text` is shown once and stored nowhere; the rest is what is stored."""

    text: str
    public_id: str
    hashed: bytes


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key's row joined with its tenant's."""

    public_id: str
    hashed: bytes
    role: Role
    tenant_id: str
    is_tenant_suspended: bool = False
    share_group: str | None = None  # tenants of one group share cached blocks
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    # None: the tenant goes by the default, and the key has no limits of its own.
    tenant_quota: Quota | None = None
    key_quota: Quota | None = None
    # Whom its use is charged to.
    cost_center: str = ""
    tenant_labels: Mapping[str, str] = field(default_factory=dict)
    key_labels: Mapping[str, str] = field(default_factory=dict)
    # Of its tenant.
    captures_content: bool = False

    def is_live(self, now: datetime) -> bool:
        """Whether the key opens anything at `now` (an aware time)."""
        # A revocation holds from the moment it is known, whatever this machine's clock says of its time.
        return (
            self.revoked_at is None
            and not self.is_tenant_suspended
            and (self.expires_at is None or now < self.expires_at)
        )


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key as people see it: all of its row but the hash."""

    public_id: str
    tenant_id: str
    role: Role
    name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    quota: Quota | None = None
    # The key that this one was rotated from.
    replaces: str | None = None
    created_at: datetime | None = None
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None

    def state(self, now: datetime) -> str:
        """`live`, `expired` or `revoked`; a suspended tenant's keys are live and open nothing."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "live"


def make_key(pepper: bytes) -> NewKey:
    """A new random key."""
    public_id = _random_base62(PUBLIC_ID_CHARS)
    secret = _random_base62(SECRET_CHARS)
    return NewKey(f"{_PREFIX}_{public_id}_{secret}", public_id, hash_secret(pepper, public_id, secret))


def parse_key(text: str) -> tuple[str, str] | None:
    """The public id and the secret of a key, or None for any other text."""
    # Checked first: nothing below should work on a header of a megabyte.
    if len(text) != len(_PREFIX) + 2 + PUBLIC_ID_CHARS + SECRET_CHARS or not text.isascii():
        return None
    prefix, _, rest = text.partition("_")
    public_id, _, secret = rest.partition("_")
    if prefix != _PREFIX or len(public_id) != PUBLIC_ID_CHARS or not (public_id + secret).isalnum():
        return None
    return public_id, secret


def hash_secret(pepper: bytes, public_id: str, secret: str) -> bytes:
    """The keyed hash that is stored; it covers the public id, so that no hash serves another row."""
    return hmac.digest(pepper, f"{public_id}:{secret}".encode(), hashlib.sha256)


def is_right_secret(pepper: bytes, stored: StoredKey | None, public_id: str, secret: str) -> bool:
    """Compare in constant time; an unknown key takes as long as a known one."""
    expected = stored.hashed if stored is not None else bytes(hashlib.sha256().digest_size)
    is_equal = hmac.compare_digest(hash_secret(pepper, public_id, secret), expected)
    return is_equal and stored is not None


def _random_base62(num_chars: int) -> str:
    return "".join(secrets.choice(BASE62) for _ in range(num_chars))
