"""The limiter that answers also while the shared store is away, as declared for each kind of limit."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

from footplate.tenancy.errors import LimiterCallFailed, LimiterUnavailable
from footplate.tenancy.limiter.breaker import Breaker
from footplate.tenancy.limiter.decisions import (
    Amounts,
    BudgetSeed,
    Decision,
    LimitState,
    Refusal,
    RefusalKind,
    Spending,
    Spent,
)
from footplate.tenancy.limiter.limits import WINDOWS, Limit, LimitKind, Scope
from footplate.tenancy.limiter.local import LocalLimiter
from footplate.tenancy.limiter.reservations import Beat, Limiter, Outcome, ReservationState

_LOGGER = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")
_End = Callable[[], Coroutine[Any, Any, Outcome]]


# A tenant's id that nobody has: asking for it touches nothing.
NOBODY = "-"


def _note_id(request_id: str) -> str:
    """The lease in the store of what was noted of a local reservation.

    Another than its own: the store may have been asked for that one in vain, and will hear that it is over.
    """
    return f"{request_id}:note"


class DegradedMode(StrEnum):
    """What a limit does while the store is away."""

    LOCAL = "local"  # this process holds its share of the limit by itself
    CLOSED = "closed"  # every request that meets the limit is refused
    OPEN = "open"  # the limit does not hold


@dataclass(frozen=True, slots=True)
class DegradedConfig:
    """`modes`: kinds left out are LOCAL. `local_share`: this process's part of a limit, above 0, at most 1.

    `max_unsent`: how many ends of reservations are kept for the store's return; the oldest are dropped first,
    and their reservations then expire. `max_known`: of how many windows it is known what they last held.
    """

    modes: Mapping[LimitKind, DegradedMode] = field(default_factory=dict)
    local_share: float = 1.0
    max_unsent: int = 10_000
    max_known: int = 20_000

    def __post_init__(self) -> None:
        if not 0 < self.local_share <= 1:
            raise ValueError(f"local_share is {self.local_share}; it must be above 0 and at most 1")

    def mode_of(self, limit: Limit) -> DegradedMode:
        """What a limit does while the store is away."""
        return self.modes.get(limit.kind, DegradedMode.LOCAL)


class DegradingLimiter:
    """A `Limiter` over a shared and a local one; it never raises LimiterUnavailable. One event loop owns it.

    A reservation lives where it was made: those of the local limiter end there, whatever the store does. What
    was noted of them goes to the store with the first heart-beat after its return, under a lease that counts
    for no limit.
    """

    def __init__(
        self, shared: Limiter, local: LocalLimiter, breaker: Breaker, config: DegradedConfig | None = None
    ) -> None:
        self._shared = shared
        self._local = local
        self._breaker = breaker
        self._config = config or DegradedConfig()
        self._is_degraded = False
        self._num_changes = 0
        # Ends that the store may not have heard of, oldest first.
        self._unsent: OrderedDict[tuple[str, str], _End] = OrderedDict()
        # What the store last said of each window, and until when that may be in it; the latest at the end.
        self._known: OrderedDict[tuple[Scope, LimitKind], tuple[int, int]] = OrderedDict()
        # Notes of local reservations, and which of them the store has by now.
        self._notes: dict[tuple[str, str], bytes] = {}
        self._told_notes: set[tuple[str, str]] = set()

    @property
    def is_degraded(self) -> bool:
        """Whether the last call found the store away."""
        return self._is_degraded

    @property
    def num_changes(self) -> int:
        """How often the store was lost or found."""
        return self._num_changes

    def modes(self) -> dict[LimitKind, DegradedMode]:
        """What each kind of limit does while the store is away."""
        return {kind: self._config.modes.get(kind, DegradedMode.LOCAL) for kind in LimitKind}

    @property
    def num_unsent(self) -> int:
        """How many ends of reservations wait for the store."""
        return len(self._unsent)

    async def reserve(
        self,
        tenant_id: str,
        request_id: str,
        limits: Sequence[Limit],
        amounts: Amounts,
        note: bytes = b"",
        money: Spending | None = None,
    ) -> Decision:
        """As `Limiter.reserve`; while the store is away, as each limit's mode says."""
        if not (limits or note or money) or self._local.knows(tenant_id, request_id):
            return await self._local.reserve(tenant_id, request_id, limits, amounts)
        decision = await self._ask(
            lambda: self._shared.reserve(tenant_id, request_id, limits, amounts, note, money),
            # It may have taken all the same, or will when it goes on: nobody else would end that.
            undo=((tenant_id, request_id), lambda: self._shared.release(tenant_id, request_id)),
        )
        if decision is None:
            if money is not None and any(budget.max_amount is not None for budget in money.budgets):
                # What others spend meanwhile can't be known: budgets are closed.
                return Decision(request_id, refusal=Refusal(RefusalKind.UNAVAILABLE, retry_after_s=1))
            decision = await self._reserve_degraded(tenant_id, request_id, limits, amounts)
            decision = replace(decision, is_local=True)
            if note and decision.is_admitted:
                self._notes[tenant_id, request_id] = note
            return decision
        self._note(decision.states)
        return decision

    async def seed(self, tenant_id: str, seeds: Sequence[BudgetSeed]) -> None:
        """As `Limiter.seed`; while the store is away nobody asks for it."""
        await self._ask(lambda: self._shared.seed(tenant_id, seeds))

    async def settle(
        self, tenant_id: str, request_id: str, num_tokens: int | None, spent: Spent | None = None
    ) -> Outcome:
        """As `Limiter.settle`; while the store is away, kept and sent later, and UNHEARD until then."""
        if self._local.knows(tenant_id, request_id):
            await self._end_note(tenant_id, request_id)
            return await self._local.settle(tenant_id, request_id, num_tokens)
        return await self._end(
            (tenant_id, request_id), lambda: self._shared.settle(tenant_id, request_id, num_tokens, spent)
        )

    async def release(self, tenant_id: str, request_id: str) -> Outcome:
        """As `Limiter.release`, and as `settle` while the store is away."""
        if self._local.knows(tenant_id, request_id):
            await self._end_note(tenant_id, request_id)
            return await self._local.release(tenant_id, request_id)
        return await self._end((tenant_id, request_id), lambda: self._shared.release(tenant_id, request_id))

    async def heartbeat(self, tenant_id: str, beats: Sequence[Beat]) -> list[Outcome]:
        """As `Limiter.heartbeat`; while the store is away they are lost, and UNHEARD."""
        own = [beat for beat in beats if self._local.knows(tenant_id, beat.request_id)]
        found: dict[str, Outcome] = {}
        if own:
            names = [beat.request_id for beat in own]
            found = dict(zip(names, await self._local.heartbeat(tenant_id, own), strict=True))
            await self._tell_notes(tenant_id, names)
        told = [beat for beat in beats if beat.request_id not in found]
        told += [
            replace(beat, request_id=_note_id(beat.request_id))
            for beat in own
            if self._has_told(tenant_id, beat)
        ]
        outcomes = await self._ask(lambda: self._shared.heartbeat(tenant_id, told)) if told else None
        for beat, outcome in zip(told, outcomes or (), strict=False):
            found[beat.request_id] = outcome
        for beat in own:
            of_note = found.get(_note_id(beat.request_id))
            if of_note is not None and of_note.state is ReservationState.UNKNOWN:
                # The store has lost its data: the next beat tells it again.
                self._told_notes.discard((tenant_id, beat.request_id))
        unheard = Outcome(False, ReservationState.UNHEARD)
        return [found.get(beat.request_id, unheard) for beat in beats]

    async def peek(self, tenant_id: str, limits: Sequence[Limit]) -> tuple[LimitState, ...]:
        """As `Limiter.peek`; while the store is away, of this process alone."""
        states = await self._ask(lambda: self._shared.peek(tenant_id, limits))
        if states is None:
            self._tell_local(limits)
            return await self._local.peek(tenant_id, limits)
        self._note(states)
        return states

    async def sweep(self, tenant_id: str) -> int:
        """As `Limiter.sweep`, in both limiters."""
        num_local = await self._local.sweep(tenant_id)
        return num_local + (await self._ask(lambda: self._shared.sweep(tenant_id)) or 0)

    async def look_after_store(self) -> None:
        """Find out whether the store is there, and tell it what it has not heard of.

        Called every half a second or so, it makes the outage known without any request, and the return too.
        """
        if await self._ask(lambda: self._shared.sweep(NOBODY)) is not None:
            await self.send_unsent()

    async def send_unsent(self) -> int:
        """Tell the store the ends that it has not heard of; how many are left. Whoever beats also calls this.

        An end that comes after its lease changes nothing: the reservation has expired.
        """
        while self._unsent:
            name, end = next(iter(self._unsent.items()))
            if await self._ask(end) is None and self._is_degraded:
                break
            # One that failed by itself leaves the others their turn; its reservation expires.
            self._unsent.pop(name, None)
        return len(self._unsent)

    async def _tell_notes(self, tenant_id: str, request_ids: Sequence[str]) -> None:
        """Give the store the notes of requests that began while it was away."""
        for request_id in request_ids:
            name = (tenant_id, request_id)
            note = self._notes.get(name)
            if note is None or name in self._told_notes:
                continue
            decision = await self._ask(
                lambda request_id=request_id, note=note: self._shared.reserve(  # type: ignore[misc]
                    tenant_id, _note_id(request_id), (), Amounts(), note
                )
            )
            if decision is None:
                return
            if name not in self._notes:
                # It ended meanwhile.
                await self._release_note(tenant_id, request_id)
            else:
                self._told_notes.add(name)

    async def _end_note(self, tenant_id: str, request_id: str) -> None:
        name = (tenant_id, request_id)
        self._notes.pop(name, None)
        if name in self._told_notes:
            self._told_notes.discard(name)
            await self._release_note(tenant_id, request_id)

    async def _release_note(self, tenant_id: str, request_id: str) -> None:
        name = (tenant_id, _note_id(request_id))
        await self._end(name, lambda: self._shared.release(*name))

    def _has_told(self, tenant_id: str, beat: Beat) -> bool:
        return (tenant_id, beat.request_id) in self._told_notes

    async def _end(self, name: tuple[str, str], end: _End) -> Outcome:
        if name in self._unsent:
            return Outcome(False, ReservationState.UNHEARD)
        outcome = await self._ask(end)
        if outcome is not None:
            return outcome
        self._keep_unsent(name, end)
        return Outcome(False, ReservationState.UNHEARD)

    def _keep_unsent(self, name: tuple[str, str], end: _End) -> None:
        # The first end stays, of two that were sent at the same time too.
        self._unsent.setdefault(name, end)
        if len(self._unsent) > self._config.max_unsent:
            self._unsent.popitem(last=False)

    async def _reserve_degraded(
        self, tenant_id: str, request_id: str, limits: Sequence[Limit], amounts: Amounts
    ) -> Decision:
        modes = [(limit, self._config.mode_of(limit)) for limit in limits]
        for limit, mode in modes:
            if mode is DegradedMode.CLOSED and limit.is_enforced:
                return Decision(request_id, refusal=Refusal(RefusalKind.UNAVAILABLE, limit, retry_after_s=1))
        shares = [self._share_of(limit) for limit, mode in modes if mode is DegradedMode.LOCAL]
        self._tell_local(shares)
        decision = await self._local.reserve(tenant_id, request_id, shares, amounts)
        refusal = decision.refusal
        if refusal is None or refusal.kind is not RefusalKind.TOO_LARGE or refusal.limit is None:
            return decision
        whole = next(
            lim for lim in limits if (lim.scope, lim.kind) == (refusal.limit.scope, refusal.limit.kind)
        )
        if whole.max_amount and amounts.of(whole) <= whole.max_amount:
            # Too large for this process's share, not for the limit: it passes when the store is back.
            refusal = Refusal(RefusalKind.UNAVAILABLE, whole, retry_after_s=1)
        return replace(decision, refusal=refusal)

    def _note(self, states: Sequence[LimitState]) -> None:
        now_ms, known = self._local.now_ms(), self._known
        for state in states:
            if state.limit.kind in WINDOWS:
                name = (state.limit.scope, state.limit.kind)
                known[name] = (state.used, now_ms + state.reset_ms)
                known.move_to_end(name)
        while len(known) > self._config.max_known:
            known.popitem(last=False)

    def _tell_local(self, limits: Sequence[Limit]) -> None:
        """Let the local limiter begin where the store was: else each change would open a fresh limit.

        Only this process's share of it, as of the limit: the others count theirs.
        """
        for limit in limits:
            found = self._known.pop((limit.scope, limit.kind), None)
            if found is not None:
                used, until_ms = found
                self._local.learn(limit, math.ceil(used * self._config.local_share), until_ms)

    def _share_of(self, limit: Limit) -> Limit:
        share = int(limit.max_amount * self._config.local_share)
        # A small limit still lets one through, and a limit of 0 nobody.
        return replace(limit, max_amount=max(share, min(1, limit.max_amount)))

    async def _ask(
        self,
        call: Callable[[], Coroutine[Any, Any, _Answer]],
        undo: tuple[tuple[str, str], _End] | None = None,
    ) -> _Answer | None:
        """The shared limiter's answer, or None if there is none; `undo` is kept if it was asked in vain."""
        if not self._breaker.lets_through():
            return None
        answer: _Answer | None
        try:
            answer = await call()
        except LimiterCallFailed as error:
            _LOGGER.warning("a call of one tenant's limits failed: %s", error)
            if undo is not None:
                self._keep_unsent(*undo)
            answer = None
        except LimiterUnavailable as error:
            self._breaker.fail()
            if undo is not None:
                self._keep_unsent(*undo)
            if not self._is_degraded:
                self._is_degraded = True
                self._num_changes += 1
                _LOGGER.warning("limits are degraded: %s", error)
            return None
        self._breaker.succeed()
        if self._is_degraded:
            self._is_degraded = False
            self._num_changes += 1
            _LOGGER.info("limits are shared again; %d ends of reservations to send", len(self._unsent))
        return answer
