"""Money that adds up: requests under random kill -9 of everything; the ledger against the engines' journal.

LEDGER_REQUESTS sets the number of requests (2,000; 100 when CHAOS_ROUNDS is below 20), CHAOS_SEED repeats a
run. An engine with a script stands in for the model, so that a run is about the ledger and not about weights.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator

import pytest

from footplate.billing.store import CommitOutcome
from footplate.billing.usage import EventId, ModelName, Progress
from footplate.deployments.leftovers import is_alive, send_signal, wait_until
from tests.billing.builders import OpenBooks
from tests.chaos.ledger_audit import Load, audit, open_folder, running_platform
from tests.chaos.ledger_stack import MODEL
from tests.chaos.test_random_kills import ROUNDS, SEED, VICTIMS, answers
from tests.e2e.serve_process import ServeProcess

NUM_REQUESTS = int(os.environ.get("LEDGER_REQUESTS", "0")) or (2_000 if ROUNDS >= 20 else 100)
REQUESTS_PER_KILL = 25
KINDS = ("gateway", "engine", "valkey", "postgres")
RECOVER_S = 90.0


@pytest.fixture
def served() -> Iterator[ServeProcess]:
    with open_folder() as folder, running_platform(folder / "data") as process:
        yield process


def test_the_ledger_has_what_the_engines_made_whatever_was_killed(
    served: ServeProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(SEED)
    load = Load(served, NUM_REQUESTS, SEED)
    load.start()
    kills: Counter[str] = Counter()
    left: list[str] = []
    while not load.is_over:
        wanted = (sum(kills.values()) + 1) * REQUESTS_PER_KILL
        wait_until(lambda wanted=wanted: load.is_over or load.num_asked >= wanted, 120, every_s=0.02)
        if load.is_over:
            break
        left = left or rng.sample(KINDS, len(KINDS))
        name = left.pop()
        kill(served, name, rng)
        kills[name] += 1
        with capsys.disabled():
            print(f"{load.num_asked}/{NUM_REQUESTS} (CHAOS_SEED={SEED}): killed {name}", flush=True)
    assert wait_until(lambda: answers(served), RECOVER_S, every_s=0.5)
    report = audit(served, load, before=lambda books: deliver_again(books, rng))
    with capsys.disabled():
        print(f"kills {dict(kills)}; clients {dict(load.ends)}; {report}", flush=True)


def kill(served: ServeProcess, name: str, rng: random.Random) -> None:
    """Kill one process of a kind; another must stand in its place before the next kill."""
    found = VICTIMS[name](served)
    if not found:
        return
    pid = rng.choice(found)
    assert send_signal(pid, signal.SIGKILL)

    def is_replaced() -> bool:
        now = VICTIMS[name](served)
        return bool(now) and pid not in now and not is_alive(pid)

    assert wait_until(is_replaced, RECOVER_S, every_s=0.1), (SEED, name, served.processes())


def deliver_again(books: OpenBooks, rng: random.Random) -> None:
    """What was lost on its way and sent anew, out of order, some as the estimate of another gateway."""
    names = [str(name) for (name,) in books.rows("select event_id from billing.events")]
    events = []
    for name in rng.choices(names, k=min(200, 2 * len(names))):
        stored = books.events.find(EventId(name))
        assert stored is not None
        events.append(stored.event)
        progress = Progress(ModelName(MODEL), output=rng.randrange(100))
        events.append(stored.event.skeleton.lost(progress, stored.event.ended_at))
    rng.shuffle(events)
    for first in range(0, len(events), 50):
        outcomes = books.events.commit(events[first : first + 50])
        assert set(outcomes) == {CommitOutcome.REPEATED}
