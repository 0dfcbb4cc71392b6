"""What can be the address of an OTLP receiver."""

from __future__ import annotations

from urllib.parse import urlsplit

_FORM = "must be http://HOST:PORT or https://HOST:PORT"


def checked_endpoint(value: str) -> str:
    """The address of an OTLP receiver over HTTP.

    Raises:
        ValueError: it is none, or holds what belongs into a file of its own.
    """
    try:
        parts = urlsplit(value)
        is_port = parts.port is None or parts.port > 0
    except ValueError:
        raise ValueError(_FORM) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not is_port:
        raise ValueError(_FORM)
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError("must hold no credentials and no query; put them into otlp_headers_file")
    return value
