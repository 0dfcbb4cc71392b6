"""What `footplate serve` says while it starts."""

from __future__ import annotations

import io
import sys

import pytest

from footplate.deployments.cli import serve


class Terminal(io.StringIO):
    """Keeps apart what was written apart."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        return super().write(text)


def test_phases_that_begin_in_several_threads_do_not_share_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    serve._tell("starting valkey")
    assert terminal.writes == ["footplate: starting valkey\n"]
