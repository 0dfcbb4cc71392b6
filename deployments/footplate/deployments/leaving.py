"""That a node is about to be taken away: a file on it, which its engine replicas look for.

What Ray is told ends in Serve's controller, which asks a replica to stop once another stands in its place; by
then streams may have little time left. So replicas hear of it on their own node, at once and from no server.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path

# So long before the node goes streams end, for their clients to be told by the gateways.
END_BEFORE_S = 5.0
# Of the time that there is, where that is short.
MAX_SHARE = 0.25


def notice_file(run_dir: Path, node_id: str) -> Path:
    """Where a node's notice lies. By Ray's name of the node: another one in its place has not been told."""
    return run_dir / f"leaving-{node_id}"


def streams_end_after_s(seconds: float) -> float:
    """How long streams may go on on a node that is there for so many seconds more."""
    return seconds - min(END_BEFORE_S, seconds * MAX_SHARE)


def write_notice(path: Path, ends_at: float) -> None:
    """Streams of the node end at this moment of the machine's monotonic clock."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(repr(ends_at))
    new.rename(path)


def read_notice(path: Path) -> float | None:
    """When streams end, by the monotonic clock; None: nobody takes the node away."""
    try:
        return float(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None


def seconds_left(notice: str, now: datetime) -> float:
    """Of AWS's notice for a spot instance: until it is stopped, 0 when it may be any moment.

    Raises:
        ValueError: it is no such notice.
    """
    try:
        at = datetime.fromisoformat(json.loads(notice)["time"])
    except (TypeError, KeyError) as error:
        raise ValueError("it names no time") from error
    return max((at.replace(tzinfo=at.tzinfo or UTC) - now).total_seconds(), 0.0)
