"""Log lines of our processes: JSON on standard error, with no field that isn't on the list here.

Called once at the edge of each process; everything else only asks for a logger.
"""

from __future__ import annotations

import logging
import sys
import traceback
from types import TracebackType
from typing import IO

import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict, WrappedLogger

# Nothing that a client wrote has a name here. `error` is the name of an exception's class.
FIELDS = frozenset(
    {
        *("event", "level", "logger", "process", "timestamp"),
        *("request_id", "status", "sent_status", "type", "code", "error", "model", "route", "where"),
    }
)
_MAX_FRAMES = 8


def configure_logging(process: str, stream: IO[str] | None = None) -> None:
    """Let all loggers named `footplate…` write through the list, whichever library they come from.

    `process` says in each line who wrote it: gateway, engine or serve.
    """

    def name_process(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        return {**event, "process": process}

    describe: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        name_process,
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
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    ours = logging.getLogger("footplate")
    ours.handlers = [handler]
    ours.setLevel(logging.INFO)
    ours.propagate = False
    structlog.configure(
        processors=[*describe, ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.stdlib.LoggerFactory(),
    )


def only_known_fields(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Drop every field that isn't on the list."""
    return {name: value for name, value in event.items() if name in FIELDS}


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
