"""The section `telemetry` of the configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from footplate.platform.settings_section import Section

_FORM = "must be http://HOST:PORT or https://HOST:PORT"


class ContentCaptureSettings(Section):
    """Whether prompts and answers are ever written down. Off, unless somebody decides otherwise.

    Only of tenants with `captures_content`, redacted. `errors`: of requests that failed, or took longer than
    `slow_first_token_s` or, by token after the first, `slow_token_s` (seconds; null: no limit). `sampled`: of
    those, and of a `sample_ratio` of all. `retention_days`: how long they are kept.
    """

    mode: Literal["off", "errors", "sampled"] = "off"
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 0.01
    slow_first_token_s: Annotated[float, Field(gt=0)] | None = 10
    slow_token_s: Annotated[float, Field(gt=0)] | None = 1
    retention_days: Annotated[int, Field(ge=1, le=30)] = 7

    @field_validator("mode", mode="before")
    @classmethod
    def _unquoted_off(cls, value: Any) -> Any:
        return "off" if value is False else value  # what YAML makes of a bare off


class TelemetrySettings(Section):
    """Where traces, metrics and log lines go.

    `otlp_endpoint`: a receiver over HTTP, such as http://collector:4318; null exports nothing.
    `otlp_headers_file`: `name: value` lines to send with it, for its credentials. `trace_ratio`: the share
    that is traced of the requests whose clients don't decide it. `trusts_traceparent`: clients whose key is
    known decide it by the flag of their `traceparent`; false: nobody does. `engine_metrics_port`: replica 0
    of a model answers `/metrics` there, replica 1 at the next port, or at another of the 32 from there on
    where theirs is taken; 0: each at a free port; null: not at all. `footplate_engine_metrics_port` tells
    which. `engine_metrics_host`: on which address.
    """

    otlp_endpoint: str | None = None
    otlp_headers_file: str | None = None
    trace_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    trusts_traceparent: bool = True
    prometheus: bool = True
    engine_metrics_host: str = "127.0.0.1"
    engine_metrics_port: Annotated[int, Field(ge=0, le=65_535)] | None = 0
    content_capture: ContentCaptureSettings = ContentCaptureSettings()

    @field_validator("otlp_endpoint")
    @classmethod
    def _known_endpoint(cls, value: str | None) -> str | None:
        return None if value is None else checked_endpoint(value)


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
