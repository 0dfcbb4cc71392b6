"""What a killed gateway left open on this machine is found once, and what it ended is not."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from footplate.deployments.books_service import reservations
from footplate.deployments.open_requests import LeftRequests, OpenRequests, read_all_open, read_open
from footplate.tenancy.adapters.valkey.held_reservations import ValkeyHeldReservations
from footplate.tenancy.limiter.reservations import HeldReservations, LostRequest
from tests.deployments.test_engine_journal import files_of_at_most


class Carers:
    def __init__(self) -> None:
        self.told: list[LostRequest] = []
        self.is_failing = False

    async def take_care(self, lost: Sequence[LostRequest]) -> None:
        if self.is_failing:
            raise RuntimeError("away")
        self.told += lost


def killed(root: Path) -> None:
    """A process that is killed with two requests open."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        kept = OpenRequests(root, "victim", max_file_bytes=400)
        for number in range(20):
            kept.keep("a", b"note a", b"%d" % number)
            kept.keep(f"over {number}", b"note", b"")
            kept.drop(f"over {number}")
        kept.keep("b", b"note b", b"")
        os.write(writer, b"x")
        signal.pause()
    os.read(reader, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_what_a_killed_process_left_is_taken_care_of_once(tmp_path: Path) -> None:
    killed(tmp_path)
    [path] = tmp_path.glob("*.open")
    assert path.stat().st_size < 600, "it is begun anew with what is kept"
    alive = OpenRequests(tmp_path, "alive")
    alive.keep("c", b"note c", b"")
    port = Carers()
    left = LeftRequests(tmp_path, port)
    port.is_failing = True
    with pytest.raises(RuntimeError):
        asyncio.run(left.look())
    port.is_failing = False
    assert asyncio.run(left.look()) == 2
    assert port.told == [LostRequest("a", b"note a", b"19"), LostRequest("b", b"note b", b"")]
    assert asyncio.run(left.look()) == 0
    assert [found.name for found in tmp_path.iterdir()] == ["alive.open"]
    # In order: what is open stays for others to find, and without any there is no file.
    alive.close()
    assert asyncio.run(left.look()) == 1


def test_a_full_disk_costs_no_request_that_is_written_down_afterwards(tmp_path: Path) -> None:
    """Half a frame before others would hide them; a file that can't be begun leaves the one before."""
    kept = OpenRequests(tmp_path, "here", max_file_bytes=250)
    kept.keep("a", bytes(100), b"")
    size = (tmp_path / "here.open").stat().st_size
    with files_of_at_most(size + 40):
        kept.keep("b", bytes(100), b"")
        kept.keep("b", bytes(100), b"further")
        assert [request.request_id for request in read_all_open(tmp_path)] == ["a"]
    kept.keep("c", bytes(10), b"")
    found = {request.request_id: request.progress for request in read_all_open(tmp_path)}
    assert found == {"a": b"", "b": b"further", "c": b""}
    assert [path.name for path in tmp_path.iterdir()] == ["here.open"]
    for name in found:
        kept.drop(name)
    assert list(tmp_path.iterdir()) == []


def test_no_file_is_left_when_all_has_ended(tmp_path: Path) -> None:
    kept = OpenRequests(tmp_path, "p")
    kept.drop("unknown")
    assert list(tmp_path.iterdir()) == []
    kept.keep("a", b"note", b"")
    kept.drop("a")
    assert list(tmp_path.iterdir()) == []
    kept.keep("b", b"note", b"far")
    [path] = tmp_path.iterdir()
    assert read_open(path.read_bytes()) == [LostRequest("b", b"note", b"far")]
    assert read_open(path.read_bytes()[:-1]) == []
    assert [each.request_id for each in read_all_open(tmp_path)] == ["b"]
    assert list(read_all_open(tmp_path / "none")) == []
    kept.drop("b")
    kept.close()
    assert list(tmp_path.iterdir()) == []


def test_a_reconciliation_sees_what_the_store_holds_and_what_was_written_down(tmp_path: Path) -> None:
    class Held(ValkeyHeldReservations):
        def read(self) -> HeldReservations:
            return HeldReservations(frozenset({"runs"}), frozenset({"dead", "b"}))

    kept = OpenRequests(tmp_path, "p")
    kept.keep("b", b"note", b"")
    found = reservations(Held(""), tmp_path)
    kept.close()
    assert found is not None and (found.held, found.lost) == ({"runs", "b"}, {"dead"})
    assert reservations(ValkeyHeldReservations("unix:///nowhere.sock"), tmp_path) is None
