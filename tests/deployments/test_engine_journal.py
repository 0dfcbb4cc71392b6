"""What an engine has produced is known by request, also after a kill -9, in a bounded number of bytes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from footplate.deployments.engine_journal import EngineJournal, read_journals
from footplate.engine.types import FinishReason, SequenceDelta


def step(request_id: str, *ids: int, index: int = 0, finish: FinishReason | None = None) -> SequenceDelta:
    return SequenceDelta(request_id, index, ids, None, finish)


def counts(root: Path) -> dict[str, tuple[int, int]]:
    """Delivered and discarded by request."""
    found = read_journals(root)
    return {name: (each.num_delivered, each.num_discarded) for name, each in found.items()}


def test_tokens_beyond_the_end_of_an_answer_are_discarded(tmp_path: Path) -> None:
    journal = EngineJournal(tmp_path / "m" / "0")
    journal.open("a", 2)
    journal.open("b", 1)
    journal.note([step("a", 1), step("a", 2, 3, index=1), step("b", 9), step("unknown", 1)])
    assert counts(tmp_path) == {"a": (3, 0), "b": (1, 0)}
    # A stop string after the second token of the second choice; the engine was ahead.
    journal.cut("a", 1, 1)
    journal.note([step("a", 4), step("a", 5, index=1)])
    journal.note([step("a", index=1, finish=FinishReason.ABORT), step("b", 9, finish=FinishReason.LENGTH)])
    assert counts(tmp_path) == {"a": (3, 2), "b": (2, 0)}
    journal.note([step("a", finish=FinishReason.STOP)])
    # The word of the gateway may come when all is over.
    journal.cut("b", 0, 1)
    assert counts(tmp_path) == {"a": (3, 2), "b": (1, 1)}
    journal.close()
    assert counts(tmp_path) == {"a": (3, 2), "b": (1, 1)}


def test_a_killed_replica_leaves_its_last_step_and_the_next_one_keeps_it(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        journal = EngineJournal(tmp_path)
        journal.open("a", 1)
        journal.open("over", 1)
        for number in range(7):
            journal.note([step("a", number), step("over", number)])
        journal.cut("over", 0, 3)
        journal.note([step("over", finish=FinishReason.STOP)])
        os.write(writer, b"x")
        signal.pause()
    os.read(reader, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    wanted = {"a": (7, 0), "over": (3, 4)}
    assert counts(tmp_path) == wanted
    assert not read_journals(tmp_path)["a"].is_cut_off
    second = EngineJournal(tmp_path)
    assert counts(tmp_path) == wanted
    found = read_journals(tmp_path)
    assert found["a"].is_cut_off and not found["over"].is_cut_off
    # A third beside it leaves alone what is in use.
    second.open("b", 1)
    second.note([step("b", 1)])
    third = EngineJournal(tmp_path)
    second.note([step("b", 2)])
    assert counts(tmp_path) == {**wanted, "b": (2, 0)}
    third.close()
    second.close()


def test_a_torn_end_costs_no_more_than_itself(tmp_path: Path) -> None:
    journal = EngineJournal(tmp_path)
    journal.open("a", 1)
    journal.note([step("a", 1)])
    journal.note([step("a", 2)])
    [path] = tmp_path.glob("*.steps")
    data = path.read_bytes()
    for length in range(len(data) - 16, len(data)):
        path.write_bytes(data[:length])
        assert counts(tmp_path) == {"a": (1, 0)}
    journal.close()


def test_files_stay_bounded_and_what_runs_is_carried_on(tmp_path: Path) -> None:
    journal = EngineJournal(tmp_path, max_step_bytes=500, max_ended_bytes=500, max_kept_bytes=1500)
    journal.open("long", 1)
    for number in range(300):
        journal.open(f"r{number}", 1)
        journal.note([step("long", 1), step(f"r{number}", 1, 2, finish=FinishReason.STOP)])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 4 * 500
    found = counts(tmp_path)
    assert found["long"] == (300, 0)
    # The oldest are gone, the newest are there.
    assert found["r299"] == (2, 0) and "r0" not in found
    journal.close()


def test_what_many_short_lives_have_written_is_kept(tmp_path: Path) -> None:
    for number in range(40):
        journal = EngineJournal(tmp_path)
        journal.open(f"r{number}", 1)
        journal.note([step(f"r{number}", 1, finish=FinishReason.STOP)])
        journal.close()
    assert counts(tmp_path) == {f"r{number}": (1, 0) for number in range(40)}


def test_a_full_disk_stops_no_engine(tmp_path: Path) -> None:
    journal = EngineJournal(tmp_path)
    journal.open("a", 1)
    descriptor = journal._steps
    os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)
    journal.note([step("a", 1)])
    journal.forget("a")
    journal.close()
