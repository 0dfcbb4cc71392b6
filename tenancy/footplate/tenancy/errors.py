"""What can go wrong in tenancy.

    TenancyError
    ├── AmountUnknown       a limit counts tokens and nobody has said how many
    ├── InvalidQuota        a quota's field is unknown or outside what it allows
    ├── LimiterUnavailable  the store of the limits can't be asked
    ├── MasterKeyError      the master key file is missing, unreadable or no key of ours
    ├── NameTaken           a tenant of that name exists
    ├── NotFound            no such tenant or key
    └── StoreUnavailable    the store of tenants and keys can't be asked now

Messages never hold a secret.
"""

from __future__ import annotations


class TenancyError(Exception):
    """Root of the tree; never raised itself."""


class AmountUnknown(TenancyError):
    """A limit counts tokens, and the request came without an estimate of them."""


class InvalidQuota(TenancyError):
    """A quota can't be as asked; `field` is the field's name, with dots into `per_model`."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message, field)
        self.message = message
        self.field = field

    def __str__(self) -> str:
        return self.message


class LimiterUnavailable(TenancyError):
    """The store of the limits gave no answer in time, or a wrong one; it may have taken, or not."""


class MasterKeyError(TenancyError):
    """The master key can't be used; the message names the file and the mend."""


class NameTaken(TenancyError):
    """A tenant of that name exists already."""


class NotFound(TenancyError):
    """There is no tenant or key of that name or id."""


class StoreUnavailable(TenancyError):
    """The store of tenants and keys gave no answer; nobody is let in meanwhile."""
