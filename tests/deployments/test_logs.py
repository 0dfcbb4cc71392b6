"""What our processes write into their logs, and what can't get there."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

from footplate.deployments.logs import FIELDS, configure_logging, set_line_sink, withhold_others
from footplate.platform.telemetry.spans import CURRENT, Tracer

CANARY = "canary-77ab01"


@pytest.fixture
def lines() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """The lines written so far, as values."""
    ours = logging.getLogger("footplate")
    before = ours.handlers, ours.level, ours.propagate
    hooks = sys.excepthook, threading.excepthook, logging.getLogRecordFactory(), logging.raiseExceptions
    written = io.StringIO()
    configure_logging("gateway", written)
    yield lambda: [json.loads(line) for line in written.getvalue().splitlines()]
    ours.handlers, ours.propagate = before[0], before[2]
    ours.setLevel(before[1])
    sys.excepthook, threading.excepthook = hooks[:2]
    logging.setLogRecordFactory(hooks[2])
    logging.raiseExceptions = hooks[3]
    logging.captureWarnings(False)
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


def test_fields_of_another_form_never_get_out(lines: Callable[[], list[dict[str, Any]]]) -> None:
    text = f"say {CANARY} again"
    fields = {name: text for name in FIELDS - {"event", "level", "logger", "process", "timestamp"}}
    structlog.get_logger("footplate.edge").error("request failed", **fields)
    [line] = lines()
    assert CANARY not in str(line)
    assert line["event"] == "request failed"


def test_a_line_names_its_request_and_its_place_in_the_trace(
    lines: Callable[[], list[dict[str, Any]]],
) -> None:
    trace = Tracer().begin("req_7", b"00-" + b"ab" * 16 + b"-" + b"cd" * 8 + b"-01")
    token = CURRENT.set(trace)
    try:
        logging.getLogger("footplate.engine").warning("blocks are lost")
    finally:
        CURRENT.reset(token)
    [line] = lines()
    assert (line["request_id"], line["trace_id"]) == ("req_7", "ab" * 16)
    assert line["span_id"] == trace.span_id.hex()


def test_a_sink_gets_what_the_list_has_passed(lines: Callable[[], list[dict[str, Any]]]) -> None:
    got: list[Any] = []
    set_line_sink(got.append)
    try:
        structlog.get_logger("footplate.edge").error("request failed", status=500, prompt=CANARY)
    finally:
        set_line_sink(None)
    assert got == lines()
    assert "prompt" not in got[0]


class Kept(logging.Handler):
    """What any other handler in the process would write."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.written.append(f"{self.format(record)} {record.__dict__}")


@pytest.mark.parametrize("name", ["uvicorn.error", "ray.serve", "sqlalchemy.pool", "httpx", "asyncio"])
def test_other_libraries_lines_lose_their_text_before_any_handler(
    lines: Callable[[], list[dict[str, Any]]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = Kept()
    logger = logging.getLogger(name)
    # Whatever a server in this process has made of it.
    monkeypatch.setattr(logger, "disabled", False)
    before = logger.level
    logger.setLevel(logging.ERROR)
    logger.addHandler(handler)
    try:
        logger.error("GET /?q=%s", CANARY)
        logger.error(f"a query with {CANARY}")
        try:
            raise ValueError(CANARY)
        except ValueError:
            logger.exception("failed", stack_info=True)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    assert len(handler.written) == 3
    assert CANARY not in str(handler.written)
    assert "ValueError at test_logs.py:" in handler.written[2]


def test_warnings_and_threads_that_die_tell_no_text(
    lines: Callable[[], list[dict[str, Any]]], capfd: pytest.CaptureFixture[str]
) -> None:
    handler = Kept()
    logging.getLogger("py.warnings").addHandler(handler)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            logging.captureWarnings(True)
            warnings.warn(CANARY, stacklevel=1)
        # pytest has a hook of its own for each test.
        withhold_others()
        threading.excepthook(threading.ExceptHookArgs((ValueError, ValueError(CANARY), None, None)))
    finally:
        logging.getLogger("py.warnings").removeHandler(handler)
    [line] = lines()
    assert (line["event"], line["error"]) == ("an exception was not caught", "ValueError")
    assert CANARY not in str(lines()) + str(handler.written) + "".join(capfd.readouterr())
