"""Where scenarios of faults keep their figures, beside what made them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from footplate.engine.bench.record import environment
from tests.chaos.test_random_kills import ROUNDS, SEED

RESULTS = Path(__file__).parent / "results"


def keep_result(name: str, **facts: Any) -> None:
    """Write a whole run's figures; short ones, as in CI, keep none."""
    if ROUNDS >= 20:
        head = {"command": "make chaos", "seed": SEED, **environment()}
        (RESULTS / f"{name}.json").write_text(json.dumps(head | facts, indent=1) + "\n")
