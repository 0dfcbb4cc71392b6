"""States, fair shares, retries and ids of batches."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.platform.batches.fairness import WaitingBatch, shares
from footplate.platform.batches.retries import MAX_FAILURES, MAX_WAIT_S, Later, judge
from footplate.platform.batches.states import (
    OPEN,
    OVER,
    check_cancellable,
    froms,
    last_status,
    may_follow,
)
from footplate.platform.batches.values import BatchStatus, event_of_request, line_event_id
from footplate.platform.errors import WrongState


def test_every_status_leads_to_an_end_and_no_end_leads_on() -> None:
    for status in OVER:
        assert not any(may_follow(status, other) for other in BatchStatus)
    for status in OPEN:
        reached, new = set(), {status}
        while new - reached:
            reached |= new
            new = {b for a, b in itertools.product(reached, BatchStatus) if may_follow(a, b)}
        assert reached & OVER
    assert froms(BatchStatus.CANCELLING) == ["in_progress", "validating"]


def test_only_what_has_work_left_can_be_cancelled() -> None:
    for status in BatchStatus:
        if status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
            assert check_cancellable(status)
        elif status in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
            assert not check_cancellable(status)
        else:
            with pytest.raises(WrongState, match=status.value):
                check_cancellable(status)
    assert last_status(None, BatchStatus.CANCELLING) is BatchStatus.CANCELLED
    assert last_status(BatchStatus.EXPIRED, BatchStatus.FINALIZING) is BatchStatus.EXPIRED


def test_places_go_to_the_tenant_with_the_fewest_lines_and_its_oldest_batch() -> None:
    waiting = [
        WaitingBatch("a2", "a", 5, 10),
        WaitingBatch("a1", "a", 1, 2),
        WaitingBatch("b1", "b", 9, 10),
    ]
    assert shares({}, waiting, 6) == [("a1", 2), ("b1", 3), ("a2", 1)]
    assert shares({"a": 4}, waiting, 3) == [("b1", 3)]
    assert shares({"a": 4}, waiting[:2], 3) == [("a1", 2), ("a2", 1)]
    assert shares({}, [], 3) == []


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 20)), max_size=8, unique=True),
    st.integers(0, 40),
)
def test_no_place_is_left_free_and_no_tenant_is_left_behind(each: list[tuple[str, int]], free: int) -> None:
    waiting = [WaitingBatch(f"{n}", tenant, n, count) for n, (tenant, count) in enumerate(each)]
    given_out = dict(shares({}, waiting, free))
    by_id = {batch.batch_id: batch for batch in waiting}
    assert sum(given_out.values()) == min(free, sum(batch.num_waiting for batch in waiting))
    assert all(count <= by_id[name].num_waiting for name, count in given_out.items())
    got: Counter[str] = Counter()
    for name, count in given_out.items():
        got[by_id[name].tenant_id] += count
    wanted: Counter[str] = Counter()
    for batch in waiting:
        wanted[batch.tenant_id] += batch.num_waiting
    for one, other in itertools.permutations(wanted, 2):
        # Who has less than another by more than one has nothing more to run.
        assert got[one] >= got[other] - 1 or got[one] == wanted[one]


def test_what_passes_is_waited_for_and_what_does_not_is_an_answer() -> None:
    assert judge(429, {"retry-after": "7"}, 0) == Later(7.0, is_failure=False)
    assert judge(503, {}, 0) == Later(1.0, is_failure=False)
    assert judge(503, {"retry-after": "99999"}, 0) == Later(MAX_WAIT_S, is_failure=False)
    assert judge(429, {"x-should-retry": "false"}, 0) is None
    for status in (200, 400, 401, 403, 404, 409, 413):
        assert judge(status, {}, 0) is None
    tries = [judge(500, {}, number) for number in range(MAX_FAILURES)]
    assert all(isinstance(each, Later) and each.is_failure for each in tries[:-1]) and tries[-1] is None


def test_an_engines_request_leads_to_its_lines_event() -> None:
    event_id = line_event_id("batch_00ff", 12)
    assert event_id == "batch_req_00ff_12"
    assert event_of_request(f"{event_id}.3") == (event_id, 3)
    assert event_of_request("req_0123") == ("req_0123", 0)
    assert event_of_request(event_id) == (event_id, 0)
