"""Run every CPU benchmark of the engine; each writes its rows to results/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = ("bench_kv_memory.py", "bench_batching.py", "compare_llama_cpp.py")


def main() -> None:
    for script in SCRIPTS:
        print(f"== {script}", flush=True)
        subprocess.run([sys.executable, str(HERE / script)], check=True)


if __name__ == "__main__":
    main()
