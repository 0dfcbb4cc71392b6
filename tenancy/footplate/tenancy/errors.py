"""What can go wrong in tenancy.

    TenancyError
    ├── AccessDenied        the caller's role may not do this
    ├── AmountUnknown       a limit counts tokens and nobody has said how many
    ├── Conflict            it does not fit what is there now
    │   ├── IdempotencyKeyReused
    │   └── NameTaken       a tenant of that name exists
    ├── InvalidValue        a field can't have this value; names the field
    │   └── InvalidQuota    a quota's field is unknown or outside what it allows
    ├── LimiterUnavailable  the store of the limits can't be asked
    │   └── LimiterCallFailed  it can, but one tenant's values there are damaged
    ├── MasterKeyError      the master key file is missing, unreadable or no key of ours
    ├── NotFound            no such tenant or key, or none that the caller may know of
    ├── SpendUnknown        nobody has said yet what is spent of a budget
    └── StoreUnavailable    the store of tenants and keys can't be asked now

Messages never hold a secret.
"""

from __future__ import annotations


class TenancyError(Exception):
    """Root of the tree; never raised itself."""


class AccessDenied(TenancyError):
    """The caller's role may not do this; the message says what it may not."""


class AmountUnknown(TenancyError):
    """A limit counts tokens, and the request came without an estimate of them."""


class Conflict(TenancyError):
    """The change does not fit what is there now; the message says what stands against it."""


class IdempotencyKeyReused(Conflict):
    """The caller has used this Idempotency-Key for another request."""


class InvalidValue(TenancyError):
    """A field can't have this value; `field` is its name, with dots into objects."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message, field)
        self.message = message
        self.field = field

    def __str__(self) -> str:
        return self.message


class InvalidQuota(InvalidValue):
    """A quota can't be as asked."""


class LimiterUnavailable(TenancyError):
    """The store of the limits gave no answer in time, or a wrong one; it may have taken, or not."""


class LimiterCallFailed(LimiterUnavailable):
    """The store is there, but what it holds for this tenant is damaged; others are not concerned."""


class MasterKeyError(TenancyError):
    """The master key can't be used; the message names the file and the mend."""


class NameTaken(Conflict):
    """A tenant of that name exists already."""


class NotFound(TenancyError):
    """There is no tenant or key of that name or id, or none that the caller may know of."""


class SpendUnknown(TenancyError):
    """The store has forgotten what is spent of a budget, or never knew: the ledger must be asked first."""


class StoreUnavailable(TenancyError):
    """The store of tenants and keys gave no answer; nobody is let in meanwhile."""
