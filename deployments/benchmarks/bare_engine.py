"""The engine alone as a process of `bench_gpu_serving.py`: the loads that the clients send, without a road.

    bare_engine.py SOURCE OPTIONS

Answers JSON lines as `stream_client.py` does, with the time of the whole load.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import time
from collections import deque
from typing import Any


def main() -> None:
    from footplate.engine.config import EngineConfig
    from footplate.engine.errors import EngineError
    from footplate.engine.loader import load_engine
    from footplate.engine.types import EngineRequest, SamplingParams

    answers, sys.stdout = sys.stdout, sys.stderr
    try:
        loaded = load_engine(sys.argv[1], EngineConfig.from_options(json.loads(sys.argv[2])))
    except EngineError as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
        sys.exit(1)
    core, numbers = loaded.core, itertools.count()
    facts = {
        "dtype": loaded.dtype,
        "kv_tokens": core.scheduler.kv_tokens,
        "vocab": loaded.model_config.vocab_size,
    }
    print(json.dumps(facts), file=answers, flush=True)

    def run(load: dict[str, Any]) -> dict[str, Any]:
        """As many requests in the engine as the clients hold open, until none is left."""
        jobs, open_, tokens = deque(load["jobs"]), 0, 0
        gc.collect()
        gc.freeze()
        start = time.monotonic()
        while jobs or core.has_work:
            while jobs and open_ < load["streams"]:
                prompt, length = jobs.popleft()
                params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
                core.add(EngineRequest(f"bare-{next(numbers)}", prompt, params))
                open_ += 1
            for delta in core.step():
                tokens += len(delta.token_ids)
                open_ -= delta.finish_reason is not None
        return {"wall_s": time.monotonic() - start, "tokens": tokens}

    for line in sys.stdin:
        try:
            answer = run(json.loads(line))
        except EngineError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)
    core.shutdown()


if __name__ == "__main__":
    main()
