"""Runs the Serve stack with a scripted engine and the minimal app; the tests' child process.

    python -m tests.ray.stack_process DATA_DIR PORT SOURCE

Prints one JSON line when it answers, and stops when standard input ends.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

from footplate.deployments.autoscaling.policy import ScalingTarget
from footplate.deployments.leftovers import wait_until
from footplate.deployments.platform_run import PlatformRun, RunPlan
from footplate.deployments.specs import ModelSpec
from footplate.engine.config import EngineConfig

LOADER = "footplate.deployments.scripted_engine:ScriptedEngine.load"
STALL_S = 3.0
APP = "tests.ray.minimal_app:build"


def main(data_dir: str, port: str, source: str) -> None:
    """Start, say so, wait for the end of standard input, stop."""
    config = EngineConfig(max_num_seqs=64, max_waiting=2)
    model = ModelSpec("scripted", source, config, loader=LOADER)
    pair = ModelSpec("pair", source, config, loader=LOADER, min_replicas=2, max_replicas=2)
    scaling = ScalingTarget(0, 2, waiting_per_replica=1, calm_s=8.0, settle_s=1.0)
    one_by_one = EngineConfig(max_num_seqs=1, max_waiting=64)
    growing = ModelSpec(
        "growing", source, one_by_one, loader=LOADER, min_replicas=0, max_replicas=2, scaling=scaling
    )
    plan = RunPlan(
        data_dir=Path(data_dir),
        port=int(port),
        models=(model, pair, growing),
        database_url="",
        redis_url="",
        app_builder=APP,
        drain_s=1.0,
        stall_s=STALL_S,
    )
    run = PlatformRun(plan)
    try:
        run.start()
        if not wait_until(lambda: _lists_model(run.base_url), 120, every_s=0.05):
            raise SystemExit(f"the stack did not answer: {run.faults()}")
        print(json.dumps({"url": run.base_url, "phases": run.clock.phases}), flush=True)
        sys.stdin.read()
    finally:
        run.stop()


def _lists_model(base_url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{base_url}/models", timeout=2) as response:
            return json.load(response) == ["growing", "pair", "scripted"]
    except OSError:
        return False


if __name__ == "__main__":
    main(*sys.argv[1:4])
