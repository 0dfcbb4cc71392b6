"""Events on the local disk: there when `append` has returned, whatever happens to process, file or disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from footplate.billing.errors import JournalFailed
from footplate.billing.journal import Journal, frame, orphans, read_segment, waiting_events
from footplate.billing.reconcile import WaitingEvents
from footplate.billing.usage import UsageEvent
from tests.billing.builders import event

ROOT = Path(__file__).parents[2]
EVENTS = [event(f"req_{number}", tokens=(number, 0, 0)) for number in range(8)]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened = Journal(tmp_path, "one")
    yield opened
    opened.close()


def replayed(journal: Journal) -> list[UsageEvent]:
    """All that a journal holds, which it holds no longer."""
    events: list[UsageEvent] = []
    while (segment := journal.oldest()) is not None:
        events += segment.events
        journal.forget(segment)
    return events


def test_events_come_back_in_order_over_files_and_are_gone_when_forgotten(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "one", segment_bytes=600)
    for each in EVENTS:
        journal.append([each])
    assert len(list(journal.folder.glob("*.log"))) > 2
    assert not journal.is_empty
    assert replayed(journal) == EVENTS
    assert journal.is_empty
    journal.close()
    assert list(tmp_path.iterdir()) == []


def test_what_waits_is_read_beside_a_process_that_writes(journal: Journal, tmp_path: Path) -> None:
    assert waiting_events(tmp_path / "none") == WaitingEvents()
    journal.append(EVENTS[:2])
    left = Journal(tmp_path, "left", segment_bytes=600)
    for each in EVENTS[2:6]:
        left.append([each])
    left.put_aside(EVENTS[6:7])
    left.close()
    (tmp_path / "left" / "000001.damaged").write_bytes(b"?")
    found = waiting_events(tmp_path)
    assert found.ids == {each.skeleton.event_id for each in EVENTS[:6]}
    assert (found.journals, found.refused) == ({"one", "left"}, {"req_6"})
    assert found.num_damaged_files == 1
    assert replayed(journal) == EVENTS[:2]


def test_appending_goes_on_while_an_older_file_is_replayed(journal: Journal) -> None:
    journal.append(EVENTS[:2])
    segment = journal.oldest()
    assert segment is not None
    journal.append(EVENTS[2:])
    assert list(segment.events) == EVENTS[:2]
    journal.forget(segment)
    assert replayed(journal) == EVENTS[2:]


@pytest.mark.parametrize("is_cleared_away", [False, True])
def test_an_owner_that_starts_while_somebody_looks_for_orphans_gets_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cleared_away: bool
) -> None:
    (tmp_path / "one").mkdir()
    looking = Journal(tmp_path, "one")

    def look_away(_: float) -> None:
        if is_cleared_away:
            looking.close()  # there is nothing in it, so the folder goes
        else:
            assert looking._lock is not None
            os.close(looking._lock)

    monkeypatch.setattr(time, "sleep", look_away)
    owner = Journal(tmp_path, "one", wait_s=10)
    owner.append(EVENTS)
    assert replayed(owner) == EVENTS
    owner.close()


def test_a_journal_has_one_owner_and_is_an_orphan_when_that_is_gone(tmp_path: Path) -> None:
    first = Journal(tmp_path, "one")
    first.append(EVENTS)
    with pytest.raises(JournalFailed, match="held by another process"):
        Journal(tmp_path, "one")
    assert orphans(tmp_path) == []
    first.close()
    assert orphans(tmp_path) == ["one"]
    second = Journal(tmp_path, "one")
    assert replayed(second) == EVENTS
    second.close()
    assert orphans(tmp_path) == orphans(tmp_path / "nowhere") == []


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_wherever_a_crash_tears_the_file_all_whole_events_are_read(
    tmp_path: Path, data: st.DataObject
) -> None:
    whole = b"".join(map(frame, EVENTS))
    cut = data.draw(st.integers(0, len(whole)))
    path = tmp_path / "000001.log"
    path.write_bytes(whole[:cut])
    segment = read_segment(path)
    assert list(segment.events) == EVENTS[: len(segment.events)]
    assert sum(len(frame(each)) for each in segment.events) + segment.num_torn_bytes == cut
    assert segment.num_torn_bytes < max(map(len, map(frame, EVENTS)))
    assert segment.num_damaged_bytes == 0


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_costs_no_more_than_the_event_that_it_hit(tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(b"".join(map(frame, EVENTS)))
    position = data.draw(st.integers(0, len(whole) - 1))
    whole[position] ^= data.draw(st.integers(1, 255))
    path = tmp_path / "000001.log"
    path.write_bytes(whole)
    segment = read_segment(path)
    assert len(segment.events) >= len(EVENTS) - 1
    assert set(map(repr, segment.events)) < set(map(repr, EVENTS))
    assert segment.num_damaged_bytes + segment.num_torn_bytes > 0


def test_a_file_with_damage_inside_is_put_aside_and_not_deleted(journal: Journal) -> None:
    journal.append(EVENTS)
    path = journal.folder / "000001.log"
    data = bytearray(path.read_bytes())
    data[len(frame(EVENTS[0])) + 40] ^= 1
    path.write_bytes(data)
    assert replayed(journal) == [EVENTS[0], *EVENTS[2:]]
    assert [each.name for each in journal.folder.iterdir() if each.name != "lock"] == ["000001.damaged"]
    journal.close()
    assert orphans(journal.folder.parent) == []  # nothing in it that could be replayed


def test_events_that_were_put_aside_are_kept_and_not_replayed(journal: Journal) -> None:
    journal.put_aside(EVENTS[:1])
    journal.put_aside(EVENTS[1:])
    assert journal.is_empty
    assert list(read_segment(journal.folder / "refused.events").events) == EVENTS


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalFailed, match="mend the folder"):
        Journal(tmp_path / "file", "one")


def test_a_file_that_cannot_be_synced_fails_and_the_next_is_a_new_one(journal: Journal) -> None:
    journal.append(EVENTS[:1])
    assert journal._file is not None
    # A pipe takes bytes and can't be synced, as a disk that is broken.
    reading, writing = os.pipe()
    os.dup2(writing, journal._file)
    os.close(writing)
    with pytest.raises(JournalFailed):
        journal.append(EVENTS[1:2])
    os.close(reading)
    journal.append(EVENTS[2:])
    assert replayed(journal) == [EVENTS[0], *EVENTS[2:]]


FULL_DISK = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from footplate.billing.errors import JournalFull
from footplate.billing.journal import Journal
from tests.billing.builders import event
root = Path(sys.argv[1])
(root / "ballast").write_bytes(bytes(100_000))
journal = Journal(root, "one")
kept, message = [], ""
while not message:
    group = [event(f"req_{len(kept) + number}") for number in range(50)]
    try:
        journal.append(group)
        kept += group
    except JournalFull as error:
        message = str(error)
(root / "ballast").unlink()
journal.append(group)
kept += group
found = []
while (segment := journal.oldest()) is not None:
    found += segment.events
    journal.forget(segment)
print(json.dumps([message, len(kept), found == kept]))
"""


def test_a_full_disk_is_said_and_keeps_what_was_promised(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FULL_DISK)
    disk = tmp_path / "disk"
    disk.mkdir()
    inner = 'mount -t tmpfs -o size=200k tmpfs "$1" && exec "$2" "$3" "$1" "$4"'
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("a small disk of its own needs `unshare`")
    run = subprocess.run(
        [unshare, "--mount", "--map-root-user", "sh", "-c", inner, "sh", disk, sys.executable, script, ROOT],
        capture_output=True,
        text=True,
    )
    if run.returncode and "Traceback" not in run.stderr:
        pytest.skip("this machine lets nobody mount a small disk")
    assert run.returncode == 0, run.stderr
    message, num_kept, is_all_there = json.loads(run.stdout)
    assert "is full" in message and "free some space" in message
    assert is_all_there and num_kept >= 100


KILLED = """
import sys
import time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from footplate.billing.journal import Journal
from tests.billing.builders import event
journal = Journal(Path(sys.argv[1]), "victim", segment_bytes=20_000)
number = 0
while True:
    journal.append([event(f"req_{number + each}") for each in range(3)])
    number += 3
    print(number, flush=True)
"""


def test_whatever_a_killed_process_was_promised_is_there(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    root = tmp_path / "journals"
    with subprocess.Popen([sys.executable, script, root, ROOT], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        promised = 0
        while promised < 300:
            promised = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        promised = max(promised, *map(int, process.stdout.read().split() or ["0"]))
    assert orphans(root) == ["victim"]
    journal = Journal(root, "victim")
    names = [each.event_id for each in replayed(journal)]
    journal.close()
    assert names == [f"req_{number}" for number in range(len(names))]
    assert len(names) >= promised
