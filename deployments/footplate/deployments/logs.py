"""Log lines of our processes: JSON on standard error, with no field that isn't on the allow-list.

Called once at the edge of each process; everything else only asks for a logger. Lines of other libraries are
no better than their authors' care: of those only who wrote them, where, and the class of an exception stay,
whichever handler they go to.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import IO, Any

import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict, WrappedLogger

from footplate.platform.telemetry.allow_list import LOG_FIELDS, AllowList, model_form
from footplate.platform.telemetry.spans import CURRENT

FIELDS = frozenset(LOG_FIELDS)
_MAX_FRAMES = 8
_OURS = "footplate"
LineSink = Callable[[Mapping[str, Any]], None]
_line_sink: list[LineSink] = []


class _AnyModel:
    """Lines name models that are served: who writes one has resolved it. Names' form is checked still."""

    def __contains__(self, name: object) -> bool:
        return model_form(name) is not None


_allowed = AllowList(_AnyModel)


def configure_logging(process: str, stream: IO[str] | None = None) -> None:
    """Let all loggers named `footplate…` write through the list, whichever library they come from.

    `process` says in each line who wrote it: gateway, engine or serve. Lines of all other loggers lose their
    text, for good and in the whole process.
    """

    def name_process(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        return {**event, "process": process}

    describe: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        name_process,
        _name_request,
        _place_of_exception,
    ]
    # The process's own standard error: in a replica Serve puts a logger of its level WARNING in its place.
    handler = logging.StreamHandler(stream or sys.__stderr__)
    handler.addFilter(_shorten_exceptions)
    handler.setFormatter(
        ProcessorFormatter(
            foreign_pre_chain=describe,
            processors=[
                ProcessorFormatter.remove_processors_meta,
                only_known_fields,
                _give_to_sink,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    ours = logging.getLogger(_OURS)
    ours.handlers = [handler]
    ours.setLevel(logging.INFO)
    ours.propagate = False
    structlog.configure(
        processors=[*describe, ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.stdlib.LoggerFactory(),
    )
    withhold_others()


def set_line_sink(sink: LineSink | None) -> None:
    """Where each line goes too, as fields that the list has passed; it must neither wait nor raise."""
    _line_sink[:] = [] if sink is None else [sink]


def only_known_fields(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Drop every field that isn't on the list, or is none of its form."""
    return _allowed.log_line(event)


def withhold_others() -> None:
    """Take the texts out of all that other libraries log, warn of, or die with. Safe to repeat."""
    logging.setLogRecordFactory(_without_text)
    logging.captureWarnings(True)
    # A handler that fails would print the line's arguments.
    logging.raiseExceptions = False
    sys.excepthook = _tell_uncaught
    threading.excepthook = lambda failed: _tell_uncaught(
        failed.exc_type, failed.exc_value, failed.exc_traceback
    )


def _without_text(*args: Any, **kwargs: Any) -> logging.LogRecord:
    """A log record as it is made, before any handler sees it."""
    record = logging.LogRecord(*args, **kwargs)
    # None: a copy of a record that was made before.
    if record.name is None or record.name == _OURS or record.name.startswith(f"{_OURS}."):
        return record
    error = record.exc_info[1] if record.exc_info else None
    place = f"{record.filename}:{record.lineno} {record.funcName}"
    told = ""
    if error is not None:
        frames = _frames(error.__traceback__)
        told = f": {type(error).__name__}" + (f" at {frames[-1]}" if frames else "")
    record.msg, record.args = f"withheld line of {place}{told}", None
    record.exc_info = record.exc_text = record.stack_info = None
    return record


def _tell_uncaught(
    kind: type[BaseException], error: BaseException | None, place: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt | SystemExit):
        return
    logging.getLogger(f"{_OURS}.process").critical(
        "an exception was not caught",
        exc_info=(kind, error or kind(), place),
    )


def _name_request(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Which request, and which place in a trace, a line belongs to."""
    trace = CURRENT.get()
    if trace is None:
        return event
    ids = {"request_id": trace.request_id, "trace_id": trace.trace_id.hex(), "span_id": trace.span_id.hex()}
    return {**ids, **event}


def _give_to_sink(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    for sink in _line_sink:
        sink(event)
    return event


def _shorten_exceptions(record: logging.LogRecord) -> bool:
    """An exception among a message's arguments is named, not quoted: its text can hold anything."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            type(value).__name__ if isinstance(value, BaseException) else value for value in record.args
        )
    return True


def _place_of_exception(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """In place of a traceback: the class and where it was raised, without its text."""
    found = event.pop("exc_info", None)
    if found is True:
        found = sys.exc_info()
    error = found[1] if isinstance(found, tuple) else found
    if not isinstance(error, BaseException):
        return event
    return {**event, "error": type(error).__name__, "where": _frames(error.__traceback__)}


def _frames(place: TracebackType | None) -> list[str]:
    frames = traceback.extract_tb(place)[-_MAX_FRAMES:]
    return [f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in frames]
