"""Whose attempts are whose when the ledger is held against engines."""

from __future__ import annotations

from footplate.billing.reconcile import EngineCount
from footplate.deployments.batches.counts import by_event, event_ids


def test_of_a_lines_attempts_the_last_is_delivered_and_the_others_went_to_nobody() -> None:
    counts = [
        ("req_1", EngineCount(5, 5)),
        ("req_1", EngineCount(3, 2)),
        ("batch_req_a_1.1", EngineCount(7, 7, is_cut_off=True)),
        ("batch_req_a_1.10", EngineCount(4, 4)),
        ("batch_req_a_1.2", EngineCount(6, 6)),
        ("batch_req_a_2.1", EngineCount(9, 8)),
    ]
    assert by_event(counts) == {
        "req_1": EngineCount(8, 7),
        "batch_req_a_1": EngineCount(17, 4),
        "batch_req_a_2": EngineCount(9, 8),
    }
    assert event_ids(["req_1", "batch_req_a_1.3", "batch_req_a_1.4"]) == {"req_1", "batch_req_a_1"}
