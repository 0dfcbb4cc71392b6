"""What an engine has produced is known by request, also after a kill -9, in a bounded number of bytes."""

from __future__ import annotations

import os
import resource
import signal
import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from footplate.deployments.engine_journal import EngineJournal, read_journals
from footplate.engine.types import FinishReason, SequenceDelta


def step(request_id: str, *ids: int, index: int = 0, finish: FinishReason | None = None) -> SequenceDelta:
    return SequenceDelta(request_id, index, ids, None, finish)


def counts(root: Path) -> dict[str, tuple[int, int]]:
    """Delivered and discarded by request."""
    found = read_journals(root)
    return {name: (each.num_delivered, each.num_discarded) for name, each in found.items()}


def abandon(journal: EngineJournal) -> None:
    """What the system does of a journal whose process is killed."""
    for descriptor in (journal._steps, journal._ended):
        if descriptor >= 0:
            os.close(descriptor)


def cut_off(root: Path) -> set[str]:
    return {name for name, each in read_journals(root).items() if each.is_cut_off}


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """As on a full disk, a write then fails, in part or as a whole."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


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


@pytest.mark.parametrize("places", [("0", "1"), ("1", "0")])
def test_a_request_that_ran_in_two_replicas_is_what_one_of_them_delivered(
    tmp_path: Path, places: tuple[str, str]
) -> None:
    """The one that froze, and hears when it wakes that nobody waits for it, hides nothing of the other."""
    frozen, other = (EngineJournal(tmp_path / place) for place in places)
    for journal in (frozen, other):
        for name in ("nothing", "some"):
            journal.open(name, 2)
    frozen.note([step("some", 1, 2)])
    other.note([step("some", 1, 2, 3), step("nothing", 1), step("some", 4, index=1)])
    assert counts(tmp_path) == {"nothing": (1, 0), "some": (4, 2)}
    ends = [step(name, index=n, finish=FinishReason.ABORT) for name in ("nothing", "some") for n in (0, 1)]
    for journal in (other, frozen):
        journal.note(ends)
        assert counts(tmp_path) == {"nothing": (1, 0), "some": (4, 2)}
    # A stop string was found by the gateway that read the other one.
    other.cut("some", 0, 1)
    other.close()
    frozen.close()
    assert counts(tmp_path) == {"nothing": (1, 0), "some": (2, 4)}


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


def test_half_a_record_never_stands_before_others(tmp_path: Path) -> None:
    journal = EngineJournal(tmp_path)
    for name in ("a", "b", "c"):
        journal.open(name, 1)
    journal.note([step("a", 1, finish=FinishReason.STOP)])
    for suffix, torn, after in (("steps", "b", "c"), ("ended", "b", "c")):
        [path] = tmp_path.glob(f"*.{suffix}")
        size = path.stat().st_size
        finish = FinishReason.STOP if suffix == "ended" else None
        with files_of_at_most(size + 7):
            journal.note([step(torn, 1, finish=finish)])
        assert path.stat().st_size == size
        journal.note([step(after, 1, finish=finish)])
    abandon(journal)
    EngineJournal(tmp_path).close()
    assert counts(tmp_path) == {"a": (1, 0), "b": (2, 0), "c": (2, 0)}


def test_a_new_file_that_can_not_be_begun_leaves_the_old_one_and_is_tried_again(tmp_path: Path) -> None:
    journal = EngineJournal(tmp_path, max_step_bytes=100)
    in_the_way = [tmp_path / f"{journal._name}-{number:06d}.new" for number in range(2, 40)]
    for path in in_the_way:
        path.mkdir()
    journal.open("a", 1)
    for number in range(5):
        journal.note([step("a", number)])
    foreign = tmp_path / "foreign"
    with foreign.open("wb") as file:
        for number in range(5):
            journal.note([step("a", number)])
        file.flush()
        assert foreign.stat().st_size == 0, "the journal writes into a file that it does not own"
    assert 0 < counts(tmp_path)["a"][0] < 10
    for path in in_the_way:
        path.rmdir()
    journal.note([step("a", 10)])
    assert counts(tmp_path) == {"a": (11, 0)}
    journal.close()


def test_what_a_dead_process_left_stays_until_it_can_be_kept(tmp_path: Path) -> None:
    first = EngineJournal(tmp_path)
    first.open("a", 1)
    first.note([step("a", 1, 2)])
    abandon(first)
    with files_of_at_most(0):
        second = EngineJournal(tmp_path)
        second.open("b", 1)
        second.note([step("b", 1)])
        second.close()
    assert counts(tmp_path) == {"a": (2, 0)}
    EngineJournal(tmp_path).close()
    assert counts(tmp_path) == {"a": (2, 0)} and cut_off(tmp_path) == {"a"}


def test_a_process_killed_between_its_new_file_and_the_end_of_the_old_one_counts_once(tmp_path: Path) -> None:
    journal = EngineJournal(tmp_path, max_step_bytes=120)
    journal.open("a", 1)
    journal.open("over", 1)
    journal.note([step("a", 1), step("over", 1)])
    [old] = tmp_path.glob("*.steps")
    before = old.read_bytes()
    journal.note([step("over", 2, finish=FinishReason.STOP)])
    while old.exists():
        journal.note([step("a", 1)])
    wanted = counts(tmp_path)
    abandon(journal)
    old.write_bytes(before)
    assert counts(tmp_path) == wanted
    EngineJournal(tmp_path).close()
    assert counts(tmp_path) == wanted and cut_off(tmp_path) == {"a"}
    assert not list(tmp_path.glob("*.steps"))


def test_many_dead_processes_are_kept_at_once_and_only_what_ran_is_marked(tmp_path: Path) -> None:
    wanted: dict[str, tuple[int, int]] = {}
    for number in range(6):
        journal = EngineJournal(tmp_path / str(number % 2), max_ended_bytes=120)
        journal.open(f"ran{number}", 2)
        journal.open(f"over{number}", 1)
        journal.open(f"refused{number}", 1)
        journal.forget(f"refused{number}")
        journal.note([step(f"ran{number}", 1, 2, index=1), step(f"over{number}", 1)])
        journal.note([step(f"over{number}", 2, finish=FinishReason.STOP)])
        journal.cut(f"ran{number}", 1, 1)
        journal.cut(f"over{number}", 0, 1)
        abandon(journal)
        wanted |= {f"ran{number}": (1, 1), f"over{number}": (1, 1), f"refused{number}": (0, 0)}
    assert counts(tmp_path) == wanted
    for _ in range(2):
        for place in ("0", "1"):
            EngineJournal(tmp_path / place).close()
        assert counts(tmp_path) == wanted
        assert {name for name in cut_off(tmp_path) if name.startswith("over")} == set()
        assert {name for name in cut_off(tmp_path) if name.startswith("ran")} == {f"ran{n}" for n in range(6)}


def test_a_gateways_word_reaches_what_another_process_had_written_down(tmp_path: Path) -> None:
    first = EngineJournal(tmp_path)
    first.open("a", 2)
    first.note([step("a", 1, 2, 3, finish=FinishReason.STOP), step("a", 1, index=1)])
    abandon(first)
    second = EngineJournal(tmp_path)
    second.cut("a", 0, 2)
    second.cut("a", 1, 0)
    second.cut("nobody", 0, 0)
    assert counts(tmp_path) == {"a": (2, 2)} and cut_off(tmp_path) == {"a"}
    second.close()


def test_a_choice_that_is_none_is_no_harm(tmp_path: Path) -> None:
    journal = EngineJournal(tmp_path)
    journal.open("a", 1)
    journal.note([step("a", 1)])
    journal.cut("a", 7, 0)
    journal.cut("over", 2**32 - 1, 0)
    assert counts(tmp_path) == {"a": (1, 0)}
    journal.close()


@pytest.mark.parametrize(
    "damage",
    [
        b"\x01" + struct.pack("<I", 3) + b"abc",
        b"\x01" + struct.pack("<I", 9) + struct.pack("<II", 9, 1) + b"\xff",
        b"\x01" + struct.pack("<I", 9) + struct.pack("<II", 9, 2**31) + b"x",
        b"\x02" + struct.pack("<I", 5) + b"12345",
        b"\x02" + struct.pack("<I", 8) + array("I", (1, 0)).tobytes(),
        b"\x02" + struct.pack("<I", 12) + array("I", (1, 9, 1)).tobytes(),
        b"\x03" + struct.pack("<I", 12) + struct.pack("<III", 1, 9, 1),
        b"\x03" + struct.pack("<I", 2) + b"12",
    ],
    ids=[
        "a short opening",
        "no text",
        "too many choices",
        "no words",
        "half a step",
        "no choice",
        "a cut of no choice",
        "a short cut",
    ],
)
def test_a_damaged_record_hides_what_follows_and_stops_no_engine(tmp_path: Path, damage: bytes) -> None:
    journal = EngineJournal(tmp_path)
    journal.open("a", 1)
    journal.note([step("a", 1, 2)])
    [path] = tmp_path.glob("*.steps")
    with path.open("ab") as file:
        file.write(damage)
    journal.note([step("a", 3)])
    assert counts(tmp_path) == {"a": (2, 0)}
    abandon(journal)
    EngineJournal(tmp_path).close()
    assert counts(tmp_path) == {"a": (2, 0)} and cut_off(tmp_path) == {"a"}


def test_a_torn_line_of_what_has_ended_costs_no_other(tmp_path: Path) -> None:
    journal = EngineJournal(tmp_path)
    for name in ("a", "b"):
        journal.open(name, 1)
        journal.note([step(name, 1, finish=FinishReason.STOP)])
    journal.close()
    [path] = tmp_path.glob("*.ended")
    data = path.read_bytes()
    for length in range(data.index(b"\n") + 1, len(data) - 1):
        path.write_bytes(data[:length])
        assert counts(tmp_path) == {"a": (1, 0)}


def test_a_journal_whose_folder_takes_no_file_begins_one_once_it_does(tmp_path: Path) -> None:
    with files_of_at_most(0):
        journal = EngineJournal(tmp_path)
        journal.open("a", 1)
        journal.note([step("a", 1)])
    journal.note([step("a", 2)])
    assert counts(tmp_path) == {"a": (2, 0)}
    journal.close()
    assert counts(tmp_path) == {"a": (2, 0)}


def test_a_new_file_carries_on_cuts_and_leaves_out_who_was_refused(tmp_path: Path) -> None:
    journal = EngineJournal(tmp_path, max_step_bytes=200)
    for name in ("a", "refused"):
        journal.open(name, 2)
    journal.note([step("a", 1, 2, 3, index=1)])
    journal.cut("a", 1, 1)
    journal.forget("refused")
    [first] = tmp_path.glob("*.steps")
    while first.exists():
        journal.note([step("a", 1)])
    [(name, (delivered, discarded))] = counts(tmp_path).items()
    assert (name, discarded) == ("a", 2) and delivered > 1
    abandon(journal)
    EngineJournal(tmp_path).close()
    assert counts(tmp_path) == {"a": (delivered, 2)}
