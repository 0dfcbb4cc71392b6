"""Kernels compile in threads before their first launch; without a GPU, by a driver that only compiles."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import threading, torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Compiles:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

driver.set_active(Compiles())
from footplate.engine.kernels.compile_ahead import compiling_ahead
from footplate.engine.kernels.gated_activation import kernel as gate
from footplate.engine.kernels.rms_norm import kernel as norm

compiled = []
triton.knobs.runtime.jit_post_compile_hook = lambda **facts: compiled.append(facts["fn"].name)
threads = set()
compile = triton.compiler.compile
def watched(*args, **options):
    threads.add(threading.current_thread().name)
    return compile(*args, **options)
triton.compiler.compile = watched
x = torch.ones(3, 64)
with compiling_ahead():
    for _ in range(2):
        gate.gated_activation(x, "silu")
        norm.rms_norm(x, torch.ones(64), 1e-6)
print(len(compiled), len(set(compiled)), threads and all("footplate-compile" in t for t in threads))
try:
    gate.gated_activation(x, "silu")
except AttributeError as error:
    print("launched")  # the driver above can't
"""


def test_launches_compile_in_threads_and_launch_nothing(tmp_path: object) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["2", "2", "True", "launched"], done.stderr[-2000:]
