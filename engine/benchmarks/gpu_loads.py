"""A worker process of a comparison: loads come in by standard input, times go out.

Needs numpy only, so that a peer's environment can import it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # a peer's environment has no Footplate installed
from footplate.engine.bench.loads import Prompts, build, fresh

__all__ = ["Generate", "Prompts", "build", "fresh", "serve"]

# (prompts, output length of each) -> seconds until the last token of the last one
Generate = Callable[[Prompts, list[int]], float]


def serve(generate: Generate, facts: dict[str, Any]) -> None:
    """Answer loads from standard input, a JSON line each; the end of input ends it."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # engines print; only answers go to the pipe
    print(json.dumps({"ready": True, **facts}), file=answers, flush=True)
    for line in sys.stdin:
        load = json.loads(line)
        try:
            prompts, lengths = build(load, load["seed"])
            extra = generate(prompts, lengths)
            answer = {"out_tokens": sum(lengths)} | (extra if isinstance(extra, dict) else {"wall": extra})
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(answer), file=answers, flush=True)
