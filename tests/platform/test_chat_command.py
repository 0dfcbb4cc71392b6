"""`footplate chat`: Ctrl-C ends an answer, and only a single question's whole program."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from footplate.platform.cli.chat import _show


def interrupted() -> Iterator[str]:
    yield "Hel"
    yield "lo"
    raise KeyboardInterrupt


def test_in_a_conversation_an_interrupt_keeps_what_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert _show(interrupted(), is_last=False) == "Hello"
    assert capsys.readouterr().out == "Hello\n"


def test_a_single_question_ends_with_its_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        _show(interrupted(), is_last=True)
    assert capsys.readouterr().out.endswith("\n")
