"""The wall clock of single processes, stepped by libfaketime: the machine's own stays as it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

LIBRARY = "faketime/libfaketimeMT.so.1"


class FakedClock:
    """Processes that start with its `environment` go by it; their monotonic clocks are the machine's."""

    def __init__(self, file: Path) -> None:
        found = sorted(Path("/usr/lib").glob(f"*/{LIBRARY}")) or sorted(Path("/usr/lib").glob(LIBRARY))
        if not found:
            pytest.skip("a clock that steps needs libfaketime (Debian: apt-get install faketime)")
        self._file = file
        self.environment = {
            "LD_PRELOAD": str(found[0]),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            # What it caches by its own clock it goes on with after a step.
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        self.step(0)

    def step(self, hours: float) -> None:
        """Be so many hours ahead of the machine's clock: from now on and in one step."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{round(hours * 3600):+d}\n")
        new.chmod(0o644)
        new.replace(self._file)

    @contextmanager
    def inherited(self) -> Iterator[None]:
        """What is started meanwhile goes by this clock."""
        before = dict(os.environ)
        os.environ.update(self.environment)
        try:
            yield
        finally:
            for name in self.environment:
                os.environ.pop(name, None)
            os.environ.update(before)
