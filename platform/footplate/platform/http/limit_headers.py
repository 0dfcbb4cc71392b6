"""`x-ratelimit-…` headers: of the limits that count requests or tokens, the one nearest to its end."""

from __future__ import annotations

from collections.abc import Sequence

from footplate.tenancy.limiter.decisions import LimitState
from footplate.tenancy.limiter.limits import TOKEN_KINDS, LimitKind

_REQUEST_KINDS = frozenset({LimitKind.REQUESTS_PER_MINUTE})


def limit_headers(states: Sequence[LimitState]) -> list[tuple[bytes, bytes]]:
    """Limit, what remains, and when all of it will. Limits in shadow mode hold nobody up and are left out."""
    headers = []
    for name, kinds in ((b"requests", _REQUEST_KINDS), (b"tokens", TOKEN_KINDS)):
        told = [state for state in states if state.limit.kind in kinds and state.limit.is_enforced]
        if told:
            nearest = min(told, key=lambda state: (state.remaining, -state.reset_ms))
            headers += [
                (b"x-ratelimit-limit-" + name, b"%d" % nearest.limit.max_amount),
                (b"x-ratelimit-remaining-" + name, b"%d" % nearest.remaining),
                (b"x-ratelimit-reset-" + name, duration(nearest.reset_ms).encode()),
            ]
    return headers


def duration(milliseconds: int) -> str:
    """As the API writes it, in whole seconds: `0s`, `1s`, `6m0s`, `23h59m1s`."""
    seconds = -(-milliseconds // 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    text = f"{seconds}s"
    if minutes or hours:
        text = f"{minutes}m{text}"
    return f"{hours}h{text}" if hours else text
