"""What a reservation takes, gives back and charges; each promise on Valkey and in memory."""

from __future__ import annotations

import pytest

from footplate.tenancy.errors import AmountUnknown
from footplate.tenancy.limiter.decisions import Amounts, RefusalKind
from footplate.tenancy.limiter.limits import Limit, LimitKind, Scope, limits_for
from footplate.tenancy.limiter.reservations import ReservationState
from footplate.tenancy.quotas import LimitMode, Quota
from tests.tenancy.limiter.pairs import LEASE_S, Pair


def a_limit(pair: Pair, kind: LimitKind, max_amount: int, mode: LimitMode = LimitMode.ENFORCE) -> Limit:
    return Limit(Scope(pair.tenant_id), kind, max_amount, mode)


def tokens_per_minute(pair: Pair, max_amount: int) -> Limit:
    return a_limit(pair, LimitKind.TOKENS_PER_MINUTE, max_amount)


def test_settling_below_the_reservation_gives_back_exactly_the_difference(pair: Pair) -> None:
    limit = tokens_per_minute(pair, 100)
    pair.reserve("a", [limit], 80)
    pair.advance(20)
    pair.settle("a", 25)
    assert pair.used(limit) == [25]
    # What is still used leaves with the bucket that it was taken in, not with the one it was settled in.
    pair.advance(41)
    assert pair.used(limit) == [0]


def test_settling_above_the_reservation_charges_the_rest_even_over_the_limit(pair: Pair) -> None:
    limit = tokens_per_minute(pair, 100)
    pair.reserve("a", [limit], 80)
    pair.settle("a", 130)
    assert pair.used(limit) == [130]
    refused = pair.reserve("b", [limit], 0)
    assert refused.states[0].remaining == 0
    assert refused.refusal is not None and refused.refusal.kind is RefusalKind.OVER_WINDOW


def test_what_is_used_after_the_window_has_passed_is_charged_when_it_is_known(pair: Pair) -> None:
    limit = tokens_per_minute(pair, 100)
    pair.reserve("a", [limit], 10)
    for _ in range(4):
        pair.advance(LEASE_S - 1)
        pair.heartbeat("a")
    assert pair.used(limit) == [0]
    pair.settle("a", 50)
    assert pair.used(limit) == [40]


def test_settling_with_unknown_usage_keeps_all_that_was_reserved(pair: Pair) -> None:
    limits = [tokens_per_minute(pair, 100), a_limit(pair, LimitKind.REQUESTS_PER_MINUTE, 5)]
    pair.reserve("a", limits, 80)
    pair.settle("a", None)
    assert pair.used(*limits) == [80, 1]


def test_a_released_reservation_counts_for_nothing(pair: Pair) -> None:
    quota = Quota(5, 100, 1_000, 2)
    limits = limits_for(pair.tenant_id, "k", "m", tenant_quota=quota, key_quota=quota)
    pair.reserve("a", limits, 80)
    assert pair.used(*limits) == [1, 80, 80, 1] * 2
    pair.release("a")
    assert pair.used(*limits) == [0] * 8


@pytest.mark.parametrize("first", ["settle", "release", "expire"])
@pytest.mark.parametrize("second", ["settle", "release", "heartbeat"])
def test_the_first_end_of_a_reservation_stays(pair: Pair, first: str, second: str) -> None:
    limits = [tokens_per_minute(pair, 100), a_limit(pair, LimitKind.MAX_CONCURRENT_REQUESTS, 1)]
    pair.reserve("a", limits, 80)
    ends = {
        "settle": (lambda: pair.settle("a", 30), ReservationState.SETTLED),
        "release": (lambda: pair.release("a"), ReservationState.RELEASED),
        "expire": (lambda: pair.advance(LEASE_S), ReservationState.EXPIRED),
    }
    end, state = ends[first]
    end()
    before = pair.used(*limits)
    calls = {**{name: call for name, (call, _) in ends.items()}, "heartbeat": lambda: pair.heartbeat("a", 70)}
    outcome = calls[second]()
    assert outcome is not None and not outcome.is_changed
    assert outcome.state is state
    assert pair.used(*limits) == before


def test_a_process_stopped_past_its_lease_takes_nothing_twice(pair: Pair) -> None:
    """It wakes, asks again with its id, and settles: neither counts, and neither does it again."""
    limit = tokens_per_minute(pair, 100)
    pair.reserve("a", [limit], 60)
    pair.advance(LEASE_S + 1)
    pair.reserve("b", [limit], 90)
    again = pair.reserve("a", [limit], 60)
    assert again.refusal is not None and again.refusal.kind is RefusalKind.REPEATED
    assert not pair.settle("a", 60).is_changed
    assert pair.used(limit) == [90]


def test_asking_again_with_the_same_id_takes_once(pair: Pair) -> None:
    limits = [tokens_per_minute(pair, 100), a_limit(pair, LimitKind.MAX_CONCURRENT_REQUESTS, 1)]
    pair.reserve("a", limits, 80)
    again = pair.reserve("a", limits, 80)
    assert again.is_admitted and again.is_repeated
    assert pair.used(*limits) == [80, 1]


def test_heartbeats_hold_a_reservation_beyond_its_first_lease(pair: Pair) -> None:
    running = a_limit(pair, LimitKind.MAX_CONCURRENT_REQUESTS, 1)
    pair.reserve("a", [running], 0)
    for _ in range(3):
        pair.advance(LEASE_S - 1)
        assert pair.heartbeat("a").is_changed
    refused = pair.reserve("b", [running], 0)
    assert refused.refusal is not None and refused.refusal.kind is RefusalKind.CONCURRENCY
    pair.advance(LEASE_S)
    assert pair.reserve("b", [running], 0).is_admitted


def test_an_expired_reservation_gives_back_all_but_what_its_heartbeats_told(pair: Pair) -> None:
    limits = [tokens_per_minute(pair, 100), a_limit(pair, LimitKind.REQUESTS_PER_MINUTE, 5)]
    pair.reserve("a", limits, 80)
    pair.heartbeat("a", 30)
    pair.heartbeat("a", 20)
    pair.advance(LEASE_S)
    assert pair.sweep() == 1
    assert pair.used(*limits) == [30, 1]


def test_a_hundred_lost_gateways_leave_nothing_reserved(pair: Pair) -> None:
    """FAULTS b3 24. More leases end at once than one call sweeps."""
    limits = [
        a_limit(pair, LimitKind.TOKENS_PER_DAY, 1_000),
        a_limit(pair, LimitKind.MAX_CONCURRENT_REQUESTS, 100),
    ]
    for number in range(100):
        assert pair.reserve(f"lost {number}", limits, 10).is_admitted
    pair.advance(LEASE_S)
    asked = (pair.runner.run(pair.limiter.sweep(pair.tenant_id)) for _ in range(100))
    assert sum(iter(lambda: next(asked), 0)) == 100
    assert pair.used(*limits) == [0, 0]
    assert pair.reserve("next", limits, 1_000).is_admitted


def test_an_expired_reservation_is_over_before_any_sweep_has_come_to_it(pair: Pair) -> None:
    """One call sweeps fewer than these."""
    running = a_limit(pair, LimitKind.MAX_CONCURRENT_REQUESTS, 200)
    for number in range(200):
        pair.reserve(f"lost {number:03}", [tokens_per_minute(pair, 2_000), running], 10)
    pair.advance(LEASE_S)
    assert pair.settle("lost 199", 5).state is ReservationState.EXPIRED
    assert pair.reserve("next", [running], 0).states[0].used == 1


def test_refused_requests_use_nothing_of_any_limit(pair: Pair) -> None:
    """FAULTS b4 46. The limits that would admit come before and after the one that refuses."""
    limits = [
        a_limit(pair, LimitKind.REQUESTS_PER_MINUTE, 1_000),
        tokens_per_minute(pair, 100),
        a_limit(pair, LimitKind.TOKENS_PER_DAY, 10_000),
        a_limit(pair, LimitKind.MAX_CONCURRENT_REQUESTS, 1_000),
    ]
    pair.reserve("a", limits, 100)
    before = pair.used(*limits)
    for number in range(100):
        assert not pair.reserve(f"refused {number}", limits, 50).is_admitted
    assert pair.used(*limits) == before
    pair.advance(61)
    assert pair.reserve("b", limits, 100).is_admitted


def test_a_request_larger_than_its_limit_is_refused_for_good(pair: Pair) -> None:
    limits = [a_limit(pair, LimitKind.REQUESTS_PER_MINUTE, 0), tokens_per_minute(pair, 100)]
    for limit, num_tokens in ((limits[1], 101), (limits[0], 1)):
        refusal = pair.reserve(f"of {num_tokens}", [limit], num_tokens).refusal
        assert refusal is not None
        assert (refusal.kind, refusal.limit, refusal.retry_after_s) == (RefusalKind.TOO_LARGE, limit, None)


@pytest.mark.parametrize("kind", LimitKind)
def test_a_limit_of_zero_refuses_all_and_none_is_unlimited(pair: Pair, kind: LimitKind) -> None:
    """FAULTS b3 33."""
    refusal = pair.reserve("a", [a_limit(pair, kind, 0)], 0).refusal
    assert refusal is not None and refusal.kind is RefusalKind.TOO_LARGE
    unlimited = limits_for(pair.tenant_id, "k", "m", tenant_quota=Quota(**{kind.value: None}))
    assert pair.reserve("b", unlimited, 10**9).is_admitted


def test_a_shadow_limit_counts_and_refuses_nothing(pair: Pair) -> None:
    shadow = a_limit(pair, LimitKind.TOKENS_PER_MINUTE, 100, LimitMode.SHADOW)
    assert not pair.reserve("a", [shadow], 80).states[0].is_exceeded
    over = pair.reserve("b", [shadow], 80)
    assert over.is_admitted and over.states[0].is_exceeded
    assert pair.used(shadow) == [160]
    # What it counted while in the shadow holds when it is enforced.
    assert not pair.reserve("c", [tokens_per_minute(pair, 100)], 1).is_admitted


def test_each_limit_has_a_window_of_its_own(pair: Pair) -> None:
    """FAULTS b4 39 and 41: requests and tokens fill and empty apart, and a call counts its tokens."""
    requests, tokens = a_limit(pair, LimitKind.REQUESTS_PER_MINUTE, 2), tokens_per_minute(pair, 100)
    pair.reserve("a", [requests], 0)
    pair.advance(40)
    decision = pair.reserve("b", [requests, tokens], 100)
    assert [state.remaining for state in decision.states] == [0, 0]
    pair.advance(21)
    assert pair.used(requests, tokens) == [1, 100]
    assert pair.reserve("c", [requests], 0).is_admitted
    assert not pair.reserve("d", [tokens], 1).is_admitted


def test_retry_after_is_when_it_passes_and_not_before(pair: Pair) -> None:
    limit = tokens_per_minute(pair, 100)
    for name, num_tokens in (("a", 30), ("b", 30), ("c", 40)):
        pair.reserve(name, [limit], num_tokens)
        pair.settle(name, num_tokens)
        pair.advance(10)
    refusal = pair.reserve("d", [limit], 60).refusal
    assert refusal is not None and refusal.retry_after_s is not None
    # 60 need both a and b to leave. Two seconds earlier b is still in the window, wherever the second began.
    pair.advance(refusal.retry_after_s - 2)
    assert not pair.reserve("d", [limit], 60).is_admitted
    pair.advance(2)
    assert pair.reserve("d", [limit], 60).is_admitted


def test_reset_is_when_the_newest_use_leaves_and_not_what_was_given_back(pair: Pair) -> None:
    limit = tokens_per_minute(pair, 100)
    pair.reserve("a", [limit], 60)
    pair.advance(20)
    pair.reserve("b", [limit], 40)
    pair.release("b")
    [state] = pair.reserve("c", [limit], 50).states
    assert state.used == 60 and 40_000 <= state.reset_ms <= 41_000


def test_tokens_need_no_estimate_while_no_limit_counts_them(pair: Pair) -> None:
    """FAULTS b3 29."""
    requests = a_limit(pair, LimitKind.REQUESTS_PER_MINUTE, 5)
    ask = pair.limiter.reserve(pair.tenant_id, "a", [requests], Amounts())
    assert pair.runner.run(ask).is_admitted
    assert pair.runner.run(pair.limiter.settle(pair.tenant_id, "a", None)).is_changed
    [state] = pair.runner.run(pair.limiter.peek(pair.tenant_id, [requests]))
    assert state.used == 1
    with pytest.raises(AmountUnknown, match="tokens_per_minute"):
        pair.runner.run(
            pair.limiter.reserve(pair.tenant_id, "b", [requests, tokens_per_minute(pair, 5)], Amounts())
        )


def test_any_sixty_seconds_hold_at_most_the_limit(pair: Pair) -> None:
    """Told by the log of what was admitted, not by buckets: each span that begins with an admission."""
    limit = tokens_per_minute(pair, 100)
    admitted: list[tuple[int, int]] = []
    for number in range(600):
        num_tokens = 1 + number * 7 % 40
        if pair.reserve(f"request {number}", [limit], num_tokens).is_admitted:
            admitted.append((pair.now_ms(), num_tokens))
            pair.settle(f"request {number}", num_tokens)
        pair.advance(0.1 + number % 11 * 0.37)
    for begin_ms, _ in admitted:
        assert sum(n for at_ms, n in admitted if 0 <= at_ms - begin_ms < 60_000) <= 100
    assert len(admitted) > 50


def test_a_day_later_yesterdays_minute_is_forgotten(pair: Pair) -> None:
    """FAULTS b4 38."""
    limit = tokens_per_minute(pair, 100)
    pair.reserve("a", [limit], 100)
    pair.settle("a", 100)
    pair.advance(86_400)
    assert pair.used(limit) == [0]


def test_scopes_of_one_tenant_are_apart_and_its_own_holds_over_all(pair: Pair) -> None:
    tenant_quota = Quota(tokens_per_minute=150)
    key_quota = Quota(tokens_per_minute=100, per_model={"m": Quota(tokens_per_minute=45)})

    def limits(key_id: str, model: str = "other") -> tuple[Limit, ...]:
        return limits_for(pair.tenant_id, key_id, model, tenant_quota=tenant_quota, key_quota=key_quota)

    assert pair.reserve("a", limits("k1"), 100).is_admitted
    assert not pair.reserve("b", limits("k1"), 1).is_admitted
    assert not pair.reserve("c", limits("k2"), 51).is_admitted
    assert not pair.reserve("d", limits("k2", "m"), 50).is_admitted
    assert pair.reserve("e", limits("k2", "m"), 45).is_admitted
    assert pair.used(*limits("k2", "m")) == [145, 45, 45]


@pytest.mark.parametrize("back_s", [20, 59, 3_600, 100_000])
def test_a_clock_that_steps_back_forgets_nothing_and_tells_no_longer_wait(pair: Pair, back_s: int) -> None:
    limit = tokens_per_minute(pair, 100)
    # A minute that many buckets hold.
    for name in ("a", "b", "c"):
        pair.reserve(name, [limit], 30)
        pair.settle(name, 30)
        pair.advance(2)
    pair.advance(-back_s)
    refused = pair.reserve("d", [limit], 20)
    assert refused.refusal is not None and refused.refusal.kind is RefusalKind.OVER_WINDOW
    assert refused.refusal.retry_after_s is not None and refused.refusal.retry_after_s <= 61
    assert refused.states[0].reset_ms <= 61_000
    assert pair.reserve("e", [limit], 10).is_admitted
    # By the new clock all has left after a window, or two where the step was within one.
    pair.advance(61 if back_s > 100 else 61 + back_s)
    assert pair.used(limit) == [0]


def test_leases_end_by_a_clock_that_stepped_back(pair: Pair) -> None:
    limits = [a_limit(pair, LimitKind.MAX_CONCURRENT_REQUESTS, 1), tokens_per_minute(pair, 100)]
    pair.reserve("a", limits, 10)
    pair.advance(-3_600)
    assert not pair.reserve("b", limits, 10).is_admitted
    pair.advance(LEASE_S)
    assert pair.reserve("c", limits, 10).is_admitted
    assert pair.settle("a", 5).state is ReservationState.EXPIRED
