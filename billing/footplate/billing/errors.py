"""What can go wrong in billing.

    BillingError
    ├── InvalidUsage         counts of a usage event don't add up, or can't be
    ├── InvalidPrice         a price, a multiplier or a price book can't be used; names the field
    ├── InvalidReport        a report or an export can't be as asked; names the field
    ├── PriceMissing         a model has no price at that time; its events wait in quarantine, never at 0
    ├── PriceInForce         a version would change prices by which events are rated already
    ├── PeriodClosed         the change would fall into a closed month
    ├── PeriodNotClosable    a month can't be closed now; says everything that stands against it
    ├── NotFound             no such period, price version or export
    ├── ExportDiffers        a file, the events and the rollups don't sum to the same: it is not to be used
    ├── LedgerUnbalanced     entries don't sum to zero: a mistake of ours
    ├── BooksDiffer          the database was set up with another currency or timezone
    ├── JournalFailed        events can't be written down on this machine's disk
    │   └── JournalFull      because the disk is full
    ├── EventsRefused        the database can't hold an event as it is
    └── StoreUnavailable     the database can't be asked now

Messages never hold a secret, or anything that a client has sent but names of models.
"""

from __future__ import annotations

from collections.abc import Sequence


class BillingError(Exception):
    """Root of the tree; never raised itself."""


class InvalidUsage(BillingError):
    """A usage event can't be as given; the message says which count stands against which."""


class InvalidPrice(BillingError):
    """A price book can't be as asked; `field` is the name of what is wrong, with dots into objects."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message, field)
        self.message = message
        self.field = field

    def __str__(self) -> str:
        return self.message


class InvalidReport(BillingError):
    """A report or an export can't be as asked; `field` names what is wrong."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message, field)
        self.message = message
        self.field = field

    def __str__(self) -> str:
        return self.message


class PriceMissing(BillingError):
    """No version in force at that time has a price for the model."""


class PriceInForce(BillingError):
    """Events are rated by the prices that this version would change; it may begin after them."""


class PeriodClosed(BillingError):
    """The change would fall into a closed month, which no longer changes."""


class PeriodNotClosable(BillingError):
    """A month can't be closed now; `reasons` are all that stands against it."""

    def __init__(self, period_id: str, reasons: Sequence[str]) -> None:
        super().__init__(f"period {period_id} can't be closed: {'; '.join(reasons)}")
        self.reasons = tuple(reasons)


class NotFound(BillingError):
    """There is no period, price version or export of that id."""


class ExportDiffers(BillingError):
    """What was written does not sum to what reports show."""


class LedgerUnbalanced(BillingError):
    """Entries of one currency don't sum to zero."""


class BooksDiffer(BillingError):
    """The database's books are kept in another currency or timezone than this process was told."""


class JournalFailed(BillingError):
    """The local journal can't take events; the message names the folder and the mend."""


class JournalFull(JournalFailed):
    """The disk of the local journal is full."""


class EventsRefused(BillingError):
    """One of the events can't be stored as it is; none of them was."""


class StoreUnavailable(BillingError):
    """The database gave no answer; what was sent may be in it or not. To send it again is safe."""
