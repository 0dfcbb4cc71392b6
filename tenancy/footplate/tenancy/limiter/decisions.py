"""What a decision says, and the rule by which limits together admit or refuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from footplate.tenancy.errors import AmountUnknown
from footplate.tenancy.limiter.limits import TOKEN_KINDS, WINDOWS, Limit, LimitKind

# `Reading.wait_ms` of an amount that can never fit.
NEVER_MS = -1


@dataclass(frozen=True, slots=True)
class Amounts:
    """What one request asks for. `num_tokens` None: nobody could say; fine while no limit counts tokens."""

    num_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.num_tokens is not None and self.num_tokens < 0:
            raise ValueError(f"{self.num_tokens} tokens were asked for; an amount is 0 or more")

    def of(self, limit: Limit) -> int:
        """How much of a limit is asked for.

        Raises:
            AmountUnknown: the limit counts tokens and their number is not known.
        """
        if limit.kind not in TOKEN_KINDS:
            return 1
        if self.num_tokens is None:
            raise AmountUnknown(f"{limit.kind} applies, so the number of tokens must be estimated first")
        return self.num_tokens


@dataclass(frozen=True, slots=True)
class Budget:
    """What may be spent in a month; the name says whose and of which month. Amounts in 10⁻⁹ of the unit.

    `max_amount` None: it refuses nothing, and only says what is spent.
    """

    name: str
    max_amount: int | None = None


@dataclass(frozen=True, slots=True)
class Spending:
    """What a request may cost at most, and the budgets that it is paid from."""

    cost: int
    budgets: tuple[Budget, ...]
    # False: it is held whatever is spent, and nobody need know how much that is.
    is_asked: bool = True

    def only_counted(self) -> Spending:
        """The same for a request that runs already."""
        return replace(self, is_asked=False)


@dataclass(frozen=True, slots=True)
class Spent:
    """What a request has cost, and when (in ms since 1970) that was written in the ledger."""

    cost: int
    written_at_ms: int


@dataclass(frozen=True, slots=True)
class BudgetSeed:
    """What the ledger says of a budget, and when that was read."""

    name: str
    amount: int
    read_at_ms: int


@dataclass(frozen=True, slots=True)
class BudgetState:
    """What the ledger says of a budget, and what running requests may still cost, that one included."""

    budget: Budget
    spent: int
    held: int


class RefusalKind(StrEnum):
    """Why a request is refused, and so whether trying again makes sense."""

    OVER_WINDOW = "over_window"  # passes after `retry_after_s`
    TOO_LARGE = "too_large"  # larger than a whole limit: never passes
    CONCURRENCY = "concurrency"  # passes when another request ends
    BUDGET = "budget"  # passes when less is held, or with the next month
    REPEATED = "repeated"  # the id belongs to a reservation that is over: never passes
    UNAVAILABLE = "unavailable"  # the store is away and the limit's mode is `closed`


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not. `retry_after_s`: whole seconds, at least 1, or None when no time helps."""

    kind: RefusalKind
    limit: Limit | None = None
    # The state of the budget that refuses; `limit` is None then.
    budget: BudgetState | None = None
    retry_after_s: int | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """One limit's counter as the store saw it at the decision, after taking when the request was admitted.

    `wait_ms` is 0 when the amount fitted, and else the time until it will if nothing more is taken.
    """

    used: int
    reset_ms: int
    wait_ms: int


@dataclass(frozen=True, slots=True)
class LimitState:
    """What is left of a limit after the decision; `reset_ms` until all of it is, if nothing more is taken."""

    limit: Limit
    used: int
    reset_ms: int
    # Also of a limit in shadow mode, which then refused nothing.
    is_exceeded: bool

    @property
    def remaining(self) -> int:
        """Never negative: work that came out larger than its estimate may have gone over."""
        return max(0, self.limit.max_amount - self.used)


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer to one reservation. Refused requests have used nothing of any limit."""

    request_id: str
    states: tuple[LimitState, ...] = ()
    refusal: Refusal | None = None
    budgets: tuple[BudgetState, ...] = ()
    # The reservation was there: an answer was lost and the question came again. Nothing more was taken.
    is_repeated: bool = False
    # It is held in this process alone: nobody else would find its lease over.
    is_local: bool = False

    @property
    def is_admitted(self) -> bool:
        """Whether the work may start."""
        return self.refusal is None


def is_too_large(limit: Limit, amount: int) -> bool:
    """Whether no amount of waiting helps. A limit of 0 refuses all, an amount of 0 too."""
    return amount > limit.max_amount or limit.max_amount == 0


def judge(
    request_id: str,
    limits: Sequence[Limit],
    readings: Sequence[Reading],
    money: Spending | None = None,
    amounts: Sequence[float] = (),
) -> Decision:
    """The decision that follows from what the store read, one reading for each limit in the same order.

    `amounts`: spent and held of each budget, before this request.
    """
    states = tuple(
        LimitState(limit, reading.used, reading.reset_ms, reading.wait_ms != 0)
        for limit, reading in zip(limits, readings, strict=True)
    )
    # Of a reservation that was there nobody asks what is spent.
    budgets = () if money is None or not (amounts and money.is_asked) else _budgets(money, amounts)
    refusal = _over_budget(budgets) or _refusal(limits, readings)
    return Decision(request_id, states, refusal, budgets)


def _budgets(money: Spending, amounts: Sequence[float]) -> tuple[BudgetState, ...]:
    pairs = zip(money.budgets, amounts[::2], amounts[1::2], strict=True)
    return tuple(BudgetState(budget, int(spent), int(held) + money.cost) for budget, spent, held in pairs)


def _over_budget(states: Sequence[BudgetState]) -> Refusal | None:
    """The first budget that a request would pass, with all that may still be spent by those that run."""
    for state in states:
        most = state.budget.max_amount
        if most is not None and state.spent + state.held > most:
            return Refusal(RefusalKind.BUDGET, budget=state)
    return None


def _refusal(limits: Sequence[Limit], readings: Sequence[Reading]) -> Refusal | None:
    """The refusal of the limit that holds longest: for good, then the longest wait, then concurrency."""
    waits = [
        (limit, reading.wait_ms)
        for limit, reading in zip(limits, readings, strict=True)
        if limit.is_enforced and reading.wait_ms != 0
    ]
    if not waits:
        return None
    for limit, wait_ms in waits:
        if wait_ms == NEVER_MS:
            return Refusal(RefusalKind.TOO_LARGE, limit)
    windows = [(limit, wait_ms) for limit, wait_ms in waits if limit.kind in WINDOWS]
    if windows:
        limit, wait_ms = max(windows, key=lambda pair: pair[1])
        return Refusal(RefusalKind.OVER_WINDOW, limit, retry_after_s=whole_seconds(wait_ms))
    limit, _ = waits[0]
    assert limit.kind is LimitKind.MAX_CONCURRENT_REQUESTS
    # Nobody knows when another request ends.
    return Refusal(RefusalKind.CONCURRENCY, limit, retry_after_s=1)


def whole_seconds(wait_ms: int) -> int:
    """Seconds after which the wait has surely passed; at least 1."""
    return max(1, -(-wait_ms // 1000))
