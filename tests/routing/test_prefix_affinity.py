"""Who is asked first, and why."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from footplate.routing.prefix_affinity import AffinitySettings, Fleet, Question, preferred, rank
from footplate.routing.types import Reason, ReplicaId, ReplicaLoad

NAMES = [ReplicaId(name) for name in "abcd"]
A, B, C, D = NAMES
MANY = [ReplicaId(str(number)) for number in range(9)]
IDLE = {name: ReplicaLoad() for name in NAMES}


def asked(matches: dict[ReplicaId, int], num_tokens: int = 1600, **more: object) -> Question:
    return Question(num_tokens, 16, matches, **more)  # type: ignore[arg-type]


def fleet_of(loads: dict[ReplicaId, ReplicaLoad]) -> Fleet:
    fleet = Fleet()
    for name, load in loads.items():
        fleet.report(name, load)
    return fleet


def first(question: Question, loads: dict[ReplicaId, ReplicaLoad]) -> tuple[ReplicaId, Reason]:
    ranked = rank(question, fleet_of(loads), random.Random(1))[0]
    return ranked.replica, ranked.reason


def test_the_longest_prefix_is_asked_first_and_the_others_behind_by_cost() -> None:
    loads = IDLE | {B: ReplicaLoad(num_running=3), D: ReplicaLoad(num_running=1)}
    ranks = rank(asked({A: 10, C: 90}), fleet_of(loads), random.Random(1))
    assert [(r.replica, r.reason) for r in ranks] == [
        (C, Reason.PREFIX),
        (A, Reason.FALLBACK),
        (D, Reason.FALLBACK),
        (B, Reason.FALLBACK),
    ]
    assert [r.num_cached_tokens for r in ranks] == [1440, 160, 0, 0]


def test_a_holder_whose_queue_costs_more_than_the_prefix_saves_is_passed_over() -> None:
    held = {A: 50}
    assert first(asked(held), IDLE | {A: ReplicaLoad(num_prefill_tokens=700)}) == (A, Reason.PREFIX)
    replica, reason = first(asked(held), IDLE | {A: ReplicaLoad(num_prefill_tokens=8000)})
    assert replica != A
    assert reason is Reason.LOAD


def test_a_small_difference_moves_nobody() -> None:
    """Hysteresis: what is held saves 160 tokens, the queue costs 500; a move would begin the cache anew."""
    assert first(asked({A: 10}), IDLE | {A: ReplicaLoad(num_prefill_tokens=500)}) == (A, Reason.PREFIX)


def test_one_hot_prefix_spreads_over_all_replicas() -> None:
    """Each holds as much as it is sent; requests do not end."""
    counts: Counter[ReplicaId] = Counter()
    held: dict[ReplicaId, int] = {}
    settings = AffinitySettings()
    for _ in range(200):
        loads = {name: ReplicaLoad(num_running=counts[name]) for name in NAMES}
        chosen = rank(asked(held), fleet_of(loads), random.Random(3))[0]
        counts[chosen.replica] += 1
        held[chosen.replica] = 90
    assert max(counts.values()) <= settings.load_factor * 200 / 4 + settings.spare_requests
    assert len(counts) >= 3


def test_without_a_match_the_cheaper_of_two_is_first() -> None:
    loads = IDLE | {A: ReplicaLoad(num_running=9)}
    drawn = Counter(rank(asked({}), fleet_of(loads), random.Random(seed))[0].replica for seed in range(300))
    assert drawn[A] == 0
    assert min(drawn[name] for name in (B, C, D)) > 50


def test_a_session_stays_and_only_those_of_a_lost_replica_move() -> None:
    keys = [f"session {number}".encode() for number in range(200)]
    before = {key: first(asked({}, session_key=key), IDLE) for key in keys}
    assert {reason for _, reason in before.values()} == {Reason.SESSION}
    assert set(Counter(replica for replica, _ in before.values())) == set(NAMES)
    fewer = {name: load for name, load in IDLE.items() if name != B}
    for key in keys:
        now = first(asked({}, session_key=key), fewer)[0]
        assert now == before[key][0] or before[key][0] == B


def test_a_session_goes_where_its_prefix_is_before_where_it_belongs() -> None:
    key = b"session"
    home = preferred(key, NAMES)
    other = next(name for name in NAMES if name != home)
    assert first(asked({other: 50}, session_key=key), IDLE) == (other, Reason.PREFIX)
    # All hold the tenant's system prompt: that says nothing, and the session decides.
    assert first(asked(dict.fromkeys(NAMES, 20), session_key=key), IDLE) == (home, Reason.SESSION)


def test_who_begins_as_another_did_a_moment_ago_follows_it() -> None:
    assert first(asked({A: 5}, recent=B, num_recent_blocks=9), IDLE) == (B, Reason.RECENT)
    # One that is gone is nobody to follow.
    assert first(asked({A: 5}, recent=ReplicaId("gone"), num_recent_blocks=9), IDLE) == (A, Reason.PREFIX)


@given(
    st.dictionaries(st.sampled_from(MANY), st.integers(0, 200)),
    st.dictionaries(
        st.sampled_from(MANY),
        st.builds(
            ReplicaLoad,
            st.integers(0, 500),
            st.integers(0, 500),
            st.integers(0, 10**6),
            st.floats(0, 1),
        ),
    ),
    st.integers(0, 3000),
    st.binary(max_size=2),
)
def test_every_replica_is_ranked_once_whatever_comes(
    matches: dict[ReplicaId, int], loads: dict[ReplicaId, ReplicaLoad], num_tokens: int, key: bytes
) -> None:
    fleet, rng = fleet_of(loads), random.Random(1)
    found: list[ReplicaId] = []
    while ranks := rank(asked(matches, num_tokens, session_key=key), fleet, rng, found):
        assert all(r.num_cached_tokens < max(num_tokens, 1) for r in ranks)
        found += [r.replica for r in ranks]
    assert sorted(found) == sorted(loads)
