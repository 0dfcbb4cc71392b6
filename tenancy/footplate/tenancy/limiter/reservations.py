"""The life of a reservation, and what a limiter does, as a protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from footplate.tenancy.limiter.decisions import Amounts, BudgetSeed, Decision, LimitState, Spending, Spent
from footplate.tenancy.limiter.limits import Limit


class ReservationState(StrEnum):
    """HELD comes first; of the three ends, the first one to happen stays."""

    HELD = "held"
    SETTLED = "settled"
    RELEASED = "released"
    EXPIRED = "expired"
    # Never made, over for so long that it is forgotten, or lost with the store's data.
    UNKNOWN = "unknown"
    # The store is away: nobody can say.
    UNHEARD = "unheard"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Whether a call changed the reservation, and the state it found or left. Unchanged: nothing counted."""

    is_changed: bool
    state: ReservationState


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life of one request: the tokens used so far, and how far it has come, if that has changed."""

    request_id: str
    num_tokens: int = 0
    # For whoever finds its lease over; empty leaves what stood there.
    progress: bytes = b""


@dataclass(frozen=True, slots=True)
class LostRequest:
    """A request whose lease ended before anybody had ended it: its gateway died, or stood still too long."""

    request_id: str
    note: bytes
    progress: bytes


@dataclass(frozen=True, slots=True)
class HeldReservations:
    """Ids of requests over all tenants: those that run, and those whose gateways died and that wait."""

    held: frozenset[str]
    lost: frozenset[str]


class Limiter(Protocol):
    """Reserves before the work, settles once after it. All limits of a request are of one tenant."""

    async def reserve(
        self,
        tenant_id: str,
        request_id: str,
        limits: Sequence[Limit],
        amounts: Amounts,
        note: bytes = b"",
        money: Spending | None = None,
    ) -> Decision:
        """Take from every limit, or from none. The reservation is held until its lease ends.

        `note` is kept beside it for whoever finds that lease over; see `LostRequests`. With a note there is a
        lease even where there are no limits. `money` is held beside what is spent, or refused.

        Raises:
            AmountUnknown: a limit counts tokens and `amounts` does not say how many.
            SpendUnknown: what is spent of a budget must be told first; see `seed`. Nothing was taken.
            LimiterUnavailable: the store can't be asked; whether it has taken is not known. To ask again with
                the same id is safe.
        """
        ...

    async def seed(self, tenant_id: str, seeds: Sequence[BudgetSeed]) -> None:
        """Say what the ledger says of budgets. It holds for a minute, with what is settled meanwhile.

        Raises:
            LimiterUnavailable: as above.
        """
        ...

    async def settle(
        self, tenant_id: str, request_id: str, num_tokens: int | None, spent: Spent | None = None
    ) -> Outcome:
        """End it with what was used, exactly; None when nobody knows, and all that was reserved stays used.

        What was reserved and not used goes back to the bucket that it came from; what was used beyond is
        charged now, over the limit if need be.

        Raises:
            LimiterUnavailable: as above; to settle again is safe.
        """
        ...

    async def release(self, tenant_id: str, request_id: str) -> Outcome:
        """End it as if it had never been: the work did not start. The request counts for nothing either.

        Raises:
            LimiterUnavailable: as above.
        """
        ...

    async def heartbeat(self, tenant_id: str, beats: Sequence[Beat]) -> list[Outcome]:
        """Begin leases anew, and keep what each beat says; the tokens stay used if the lease should end.

        Raises:
            LimiterUnavailable: as above.
        """
        ...

    async def peek(self, tenant_id: str, limits: Sequence[Limit]) -> tuple[LimitState, ...]:
        """The state of limits; nothing is taken.

        Raises:
            LimiterUnavailable: as above.
        """
        ...

    async def sweep(self, tenant_id: str) -> int:
        """End the reservations of a tenant whose lease is over, a bounded number of them; how many it were.

        Every other call does so for its tenant as well: this is for tenants that make none.

        Raises:
            LimiterUnavailable: as above.
        """
        ...


class LostRequests(Protocol):
    """What was noted of requests whose leases ended, kept until somebody has taken care of it."""

    async def lost(self, tenant_id: str) -> tuple[Sequence[LostRequest], int]:
        """Some of a tenant's, a bounded number, and how many leases it has left.

        Raises:
            LimiterUnavailable: the store can't be asked.
        """
        ...

    async def forget_lost(self, tenant_id: str, request_ids: Sequence[str]) -> None:
        """They are taken care of.

        Raises:
            LimiterUnavailable: as above; to forget them again is safe.
        """
        ...
