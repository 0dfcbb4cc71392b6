"""Where the repository's benchmarks leave their results; `footplate.engine.bench.record` says what of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from footplate.engine.bench.record import environment, spread

__all__ = ["RESULTS", "environment", "spread", "write"]

RESULTS = Path(__file__).parent / "results"


def write(name: str, content: Mapping[str, Any]) -> Path:
    """Write results/NAME.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
