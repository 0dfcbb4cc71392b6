"""What our processes write into their logs, and what can't get there."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

from footplate.deployments.logs import FIELDS, configure_logging

CANARY = "canary-77ab01"


@pytest.fixture
def lines() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """The lines written so far, as values."""
    ours = logging.getLogger("footplate")
    before = ours.handlers, ours.level, ours.propagate
    written = io.StringIO()
    configure_logging("gateway", written)
    yield lambda: [json.loads(line) for line in written.getvalue().splitlines()]
    ours.handlers, ours.propagate = before[0], before[2]
    ours.setLevel(before[1])
    structlog.reset_defaults()


def test_a_line_says_who_wrote_it_and_what_happened(lines: Callable[[], list[dict[str, Any]]]) -> None:
    structlog.get_logger("footplate.edge").error("request failed", request_id="req_1", status=500, code=None)
    logging.getLogger("footplate.engine").warning("%d blocks are lost", 3)
    first, second = lines()
    assert first.pop("timestamp") and second.pop("timestamp")
    assert first == {
        **{"event": "request failed", "level": "error", "logger": "footplate.edge", "process": "gateway"},
        **{"request_id": "req_1", "status": 500, "code": None},
    }
    assert (second["event"], second["level"]) == ("3 blocks are lost", "warning")


def test_fields_that_are_not_on_the_list_never_get_out(lines: Callable[[], list[dict[str, Any]]]) -> None:
    fields = {name: CANARY for name in ("prompt", "messages", "text", "key", "authorization", "stop", "body")}
    structlog.get_logger("footplate.edge").error("request failed", **fields)
    logging.getLogger("footplate.edge").error("request failed", extra=fields)
    assert CANARY not in str(lines())
    assert all(set(line) <= FIELDS for line in lines())


def test_texts_of_exceptions_never_get_out(lines: Callable[[], list[dict[str, Any]]]) -> None:
    logger = logging.getLogger("footplate.engine")
    try:
        raise ValueError(CANARY)
    except ValueError as error:
        logger.exception("a step failed")
        logger.error("a step failed: %s", error)
        structlog.get_logger("footplate.edge").error("a step failed", exc_info=True)
    with_place, named, structured = lines()
    assert CANARY not in str(lines())
    assert with_place["error"] == structured["error"] == "ValueError"
    assert with_place["where"][-1].startswith("test_logs.py:")
    assert named["event"] == "a step failed: ValueError"
