"""What every test stands on: one torch thread, so that tests beside one another do not wait at barriers.

Without a GPU, Triton kernels run in Triton's interpreter; it must be told before triton is first imported.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
