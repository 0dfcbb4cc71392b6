"""Which postings an event has, and which of them are still to be made. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from footplate.billing.adapters.postgres.event_rows import StoredRow, token_values
from footplate.billing.adapters.postgres.posting import Fact
from footplate.billing.errors import PriceMissing
from footplate.billing.ledger import (
    EVENT_SEQ,
    REBOOKED_SEQ,
    RECOUNT_SEQ,
    Posting,
    PostingKey,
    PostingKind,
    difference,
    reversal,
)
from footplate.billing.prices import PriceBook, PriceVersionId
from footplate.billing.rating import RatedUsage, rate, rate_tokens
from footplate.billing.usage import UsageEvent


def own_fact(
    event_seq: int, dimension_id: int, event: UsageEvent, effective_at: datetime, book: PriceBook
) -> Fact:
    """An event's own count; without a posting when its model has no price."""
    kind = PostingKind.USAGE if effective_at == event.skeleton.started_at else PostingKind.LATE
    try:
        rated = rate(event, book, effective_at)
    except PriceMissing:
        return Fact(
            event_seq, dimension_id, event.tenant_id, kind, effective_at, 1, token_values(event.tokens)
        )
    posting = Posting(PostingKey(event.event_id, EVENT_SEQ), kind, event.tenant_id, effective_at, rated)
    return _fact(event_seq, dimension_id, posting, 1, token_values(event.tokens))


def withdrawal(stored: StoredRow) -> Fact:
    """Takes an event out of the sums of those that have no price."""
    kind = PostingKind.LATE if stored.is_late else PostingKind.USAGE
    return Fact(
        stored.event_seq,
        stored.dimension_id,
        stored.event.tenant_id,
        kind,
        stored.effective_at,
        1,
        token_values(stored.event.tokens),
        is_withdrawal=True,
    )


def recount_facts(
    stored: StoredRow, recount: UsageEvent, dimension_id: int, effective_at: datetime, book: PriceBook
) -> list[Fact]:
    """What a better count adds to an event that is posted.

    Raises:
        PriceMissing: the better count is of another model, and that has no price.
    """
    first = stored.event
    before = _by_version(first, book, stored.versions[EVENT_SEQ])
    was, now = token_values(first.tokens), token_values(recount.tokens)

    def fact(seq: int, dimension: int, num_requests: int, tokens: Iterable[int], rated: RatedUsage) -> Fact:
        key = PostingKey(first.event_id, seq)
        posting = Posting(key, PostingKind.RECOUNT, first.tenant_id, effective_at, rated)
        return _fact(stored.event_seq, dimension, posting, num_requests, tuple(tokens))

    if dimension_id == stored.dimension_id:
        after = _by_version(recount, book, stored.versions[EVENT_SEQ])
        change = (late - early for early, late in zip(was, now, strict=True))
        return [fact(RECOUNT_SEQ, dimension_id, 0, change, difference(before, after))]
    rebooked = rate(recount, book, effective_at)
    back = (-count for count in was)
    return [
        fact(RECOUNT_SEQ, stored.dimension_id, -1, back, reversal(before)),
        fact(REBOOKED_SEQ, dimension_id, 1, now, rebooked),
    ]


def _by_version(event: UsageEvent, book: PriceBook, version_id: int) -> RatedUsage:
    version = book.by_id[PriceVersionId(version_id)]
    return rate_tokens(event.tokens, event.served_model, version, is_batch=event.skeleton.is_batch)


def _fact(
    event_seq: int, dimension_id: int, posting: Posting, num_requests: int, tokens: tuple[int, ...]
) -> Fact:
    return Fact(
        event_seq,
        dimension_id,
        posting.tenant_id,
        posting.kind,
        posting.effective_at,
        num_requests,
        tokens,
        posting,
    )
