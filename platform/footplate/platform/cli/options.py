"""Values of options that need reading: labels, spans of time, moments."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import typer

_SPAN = re.compile(r"(\d{1,6})(s|m|h|d)", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}


def parse_labels(given: list[str] | None) -> dict[str, str] | None:
    """`NAME=VALUE`, any number of times; None when there is none.

    Raises:
        BadParameter: one has another form.
    """
    if not given:
        return None
    labels = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"{text!r} must be NAME=VALUE", param_hint="--label")
        labels[name] = value
    return labels


def parse_span_s(text: str, option: str) -> int:
    """`90s`, `30m`, `24h` or `7d` in seconds.

    Raises:
        BadParameter: it has another form.
    """
    found = _SPAN.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"{text!r} must be a span such as 30m, 24h or 7d", param_hint=option)
    return int(found[1]) * _SECONDS[found[2]]


def expiry(expires_at: str | None, expires_in: str | None) -> str | None:
    """The moment that one of two options names, as the API takes it.

    Raises:
        BadParameter: both are given, or one has another form.
    """
    if expires_at is not None and expires_in is not None:
        raise typer.BadParameter("give --expires-at or --expires-in, not both", param_hint="--expires-in")
    if expires_in is not None:
        end = datetime.now(UTC) + timedelta(seconds=parse_span_s(expires_in, "--expires-in"))
        return end.strftime("%Y-%m-%dT%H:%M:%SZ")
    return expires_at
