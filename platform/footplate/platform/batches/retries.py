"""What an answer to a line means: its end, or another try later. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MAX_FAILURES = 3
MAX_WAIT_S = 300.0
# Of its workers, before a line is taken for what kills them.
MAX_LOST = 10
# After the server itself has failed.
FAILED_WAIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Later:
    """Try again after a while. A `failure` counts: after some of them the line ends with it."""

    wait_s: float
    is_failure: bool


def judge(status: int, headers: Mapping[str, str], num_failures: int) -> Later | None:
    """None: the answer is the line's last, as it is.

    A refusal that says when it will pass is waited for, until the batch expires. One that no time helps
    (`x-should-retry: false`: a budget that is spent, a request larger than the whole limit) is an answer.
    """
    if status in (429, 503) and headers.get("x-should-retry") != "false":
        return Later(_seconds(headers.get("retry-after")), is_failure=False)
    if status >= 500 and num_failures + 1 < MAX_FAILURES:
        return Later(FAILED_WAIT_S * (num_failures + 1), is_failure=True)
    return None


def is_hopeless(num_failures: int, num_lost: int) -> bool:
    """Whether a line has failed or taken its worker with it so often that it is not begun again."""
    return num_failures >= MAX_FAILURES or num_lost >= MAX_LOST


def _seconds(text: str | None) -> float:
    if text is None or not text.isdecimal():
        return 1.0
    return min(MAX_WAIT_S, max(1.0, float(text[:9])))
