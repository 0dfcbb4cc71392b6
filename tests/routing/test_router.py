"""What a router decides between two reports."""

from __future__ import annotations

import random
from collections import Counter

from footplate.routing.router import RECENT_S, Router
from footplate.routing.types import BlockEvents, Reason, ReplicaId, ReplicaLoad

NAMES = [ReplicaId(name) for name in "abcd"]
A, B, C, D = NAMES


def new_router() -> Router:
    router = Router(16, rng=random.Random(5))
    for name in NAMES:
        router.report(name, ReplicaLoad(), 0.0)
        router.apply(name, BlockEvents(0, is_reset=True))
    return router


def keys_of(name: str, count: int = 100) -> list[bytes]:
    return [f"{name}-{number:06d}".encode() for number in range(count)]


def send(router: Router, keys: list[bytes], now: float, session: bytes = b"") -> tuple[ReplicaId, Reason]:
    decision = router.decide(keys, len(keys) * 16 + 8, now, session)
    chosen = decision.ranks[0]
    router.placed(decision, chosen, now)
    return chosen.replica, chosen.reason


def test_a_burst_with_one_new_prefix_goes_to_one_replica_before_any_event() -> None:
    router = new_router()
    beginning = keys_of("document", 60)
    sent = [send(router, beginning + keys_of(f"question {n}", 4), 1.0) for n in range(4)]
    assert len({replica for replica, _ in sent}) == 1
    assert [reason for _, reason in sent] == [Reason.LOAD, *[Reason.RECENT] * 3]


def test_what_was_sent_long_ago_is_followed_no_more() -> None:
    router = new_router()
    send(router, keys_of("p"), 1.0)
    assert send(router, keys_of("p"), 1.0 + RECENT_S + 0.1)[1] is Reason.LOAD


def test_requests_between_two_reports_spread_by_what_was_sent() -> None:
    router = new_router()
    counts = Counter(send(router, keys_of(f"p{n}"), 1.0)[0] for n in range(100))
    assert max(counts.values()) <= 30
    # A report that came after them holds them.
    for name in NAMES:
        router.report(name, ReplicaLoad(), 1.1)
    assert Counter(send(router, keys_of(f"q{n}"), 1.2)[0] for n in range(100)).total() == 100


def test_a_removed_replica_is_neither_asked_nor_followed() -> None:
    router = new_router()
    keys = keys_of("p")
    chosen, _ = send(router, keys, 1.0)
    router.apply(chosen, BlockEvents(1, keys))
    router.remove(chosen)
    decision = router.decide(keys, 1608, 1.1)
    assert chosen not in {ranked.replica for ranked in decision.ranks}
    assert decision.ranks[0].num_cached_tokens == 0
    assert len(decision.ranks) == 3


def test_without_replicas_there_is_nobody_to_ask() -> None:
    assert Router(16).decide(keys_of("p"), 1600, 0.0).ranks == []
