"""Which status of a batch follows which. Pure.

    validating ─> failed
        │  └────> cancelling
        └─> in_progress ─> finalizing ─> completed | expired
                 └───────> cancelling ─> cancelled

A batch whose 24 hours are over is finalized as `expired`, whatever of it is done; one that is validating by
then too. What is being finalized can't be cancelled any more: all of it has run.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from footplate.platform.batches.values import BatchStatus
from footplate.platform.errors import WrongState

_NEXT: Mapping[BatchStatus, frozenset[BatchStatus]] = MappingProxyType(
    {
        BatchStatus.VALIDATING: frozenset(
            {
                BatchStatus.IN_PROGRESS,
                BatchStatus.FAILED,
                BatchStatus.CANCELLING,
                BatchStatus.FINALIZING,
            }
        ),
        BatchStatus.IN_PROGRESS: frozenset({BatchStatus.FINALIZING, BatchStatus.CANCELLING}),
        BatchStatus.FINALIZING: frozenset({BatchStatus.COMPLETED, BatchStatus.EXPIRED}),
        BatchStatus.CANCELLING: frozenset({BatchStatus.CANCELLED}),
    }
)
OPEN = frozenset(_NEXT)
OVER = frozenset(BatchStatus) - OPEN
# What is left of its lines is not begun any more.
ENDING = frozenset({BatchStatus.FINALIZING, BatchStatus.CANCELLING})


def may_follow(before: BatchStatus, after: BatchStatus) -> bool:
    """Whether a batch may go from one status to the other."""
    return after in _NEXT.get(before, frozenset())


def froms(after: BatchStatus) -> list[str]:
    """Every status that one may follow, for a condition in the store."""
    return sorted(before.value for before in OPEN if may_follow(before, after))


def check_cancellable(status: BatchStatus) -> bool:
    """Whether cancelling changes anything: a second time it does not.

    Raises:
        WrongState: it is over, or being finalized.
    """
    if status in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
        return False
    if may_follow(status, BatchStatus.CANCELLING):
        return True
    raise WrongState(
        f"This batch is {status.value}, so there is nothing left to cancel.", "batch_not_cancellable"
    )


def last_status(ending: BatchStatus | None, status: BatchStatus) -> BatchStatus:
    """What a batch that is being ended ends as."""
    if status is BatchStatus.CANCELLING:
        return BatchStatus.CANCELLED
    return ending or BatchStatus.COMPLETED


def code_of_unfinished(last: BatchStatus) -> tuple[str, str]:
    """What stands in the error file for lines that were not run: code and message."""
    if last is BatchStatus.EXPIRED:
        return "batch_expired", "This request was not run before the batch expired."
    return "batch_cancelled", "This request was not run before the batch was cancelled."
