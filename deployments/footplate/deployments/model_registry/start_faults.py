"""Why an engine could not start, in words that anybody may read.

A replica's constructor raises `EngineStartFault`; Serve puts its text, at the end of a traceback, into the
application's status, where `find_reason` looks for it. Nothing else of that text is shown.
"""

from __future__ import annotations

import re

from footplate.deployments.errors import DeploymentError
from footplate.engine.errors import LoadError

MARK = "engine-start-fault: "
MAX_CHARACTERS = 500
_PATH = re.compile(r"(?<![\w.])/(?:[^\s'\":,()\[\]]*/)*([^\s'\":,()\[\]/]+)")


class EngineStartFault(DeploymentError):
    """An engine can't start; the text says why and holds no path that the operator did not write."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"{MARK}{self.reason}"


def reason_of(error: BaseException, *given: str | None) -> str:
    """A sentence about a failed load. `given`: what the operator wrote; paths in it may be shown."""
    if isinstance(error, LoadError):
        return safe_text(str(error), *given)
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__:
        return "memory ran out while it was loading; give it less of it, or another machine"
    return f"the engine failed with {type(error).__name__}; the replica's log says where"


def safe_text(text: str, *given: str | None) -> str:
    """One line, cut to a length, in which paths that nobody wrote are only the names of their files."""
    paths = [each.partition(":")[2] or each for each in given if each]

    def shown(found: re.Match[str]) -> str:
        return found[0] if any(path and found[0].startswith(path) for path in paths) else found[1]

    return _PATH.sub(shown, " ".join(text.split()))[:MAX_CHARACTERS]


def find_reason(message: str) -> str | None:
    """What a replica has said, in Serve's words about it; None: it has not failed to start."""
    start = message.rfind(MARK)
    if start >= 0:
        return message[start + len(MARK) :].splitlines()[0].strip()[:MAX_CHARACTERS]
    if "failed to start" not in message:
        return None
    if "died" in message or "OutOfMemory" in message or "low on memory" in message:
        return "a replica's process died while it started; perhaps memory ran out"
    return "a replica failed to start; Serve's log says more"
