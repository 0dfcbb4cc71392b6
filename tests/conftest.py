"""What every test stands on: one torch thread, so that tests beside one another do not wait at barriers."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
