"""The list of all that may leave in a span, a log line or a metric; what isn't on it is dropped.

Pure. A name alone lets nothing pass: each has a form, and a value that isn't of it is dropped too. Forms are
numbers, words of a fixed set, or identifiers that the server made; none of them has room for a sentence.
Names of models are those that are served; every other one is `_unknown`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Mapping
from types import MappingProxyType
from typing import Any

Value = str | int | float | bool | tuple[str, ...]
# A value as it may leave, or None where it may not.
Form = Callable[[Any], Value | None]

UNKNOWN = "_unknown"
_MAX_INTEGER = 2**63 - 1
_MAX_ITEMS = 16


def _integer(value: Any) -> Value | None:
    is_one = isinstance(value, int) and not isinstance(value, bool)
    return int(value) if is_one and -_MAX_INTEGER <= value <= _MAX_INTEGER else None


def _number(value: Any) -> Value | None:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return _integer(value)


def _flag(value: Any) -> Value | None:
    return value if isinstance(value, bool) else None


def _matching(pattern: str) -> Form:
    match = re.compile(pattern).fullmatch

    def form(value: Any) -> Value | None:
        return str(value) if isinstance(value, str) and match(value) else None

    return form


def _word(*words: str, other: str | None = None) -> Form:
    known = frozenset(words)

    def form(value: Any) -> Value | None:
        if not isinstance(value, str):
            return None
        return str(value) if value in known else other

    return form


def _each(form: Form) -> Form:
    def list_form(value: Any) -> Value | None:
        if not isinstance(value, list | tuple):
            return None
        found = (form(item) for item in value[:_MAX_ITEMS])
        return tuple(item for item in found if isinstance(item, str)) or None

    return list_form


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
OPERATIONS = ("chat", "text_completion", "embeddings")
SPANS = (
    "footplate.batch_line",
    "footplate.attempt",
    "footplate.route",
    "footplate.queue",
    "footplate.prefill",
    "footplate.decode",
)
EVENTS = ("footplate.admitted", "footplate.first_token", "footplate.escalated")

# Identifiers that the server makes, names of classes, routes of its own table.
_identifier = _matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_request_id = _matching(r"(req|batch_req)_[A-Za-z0-9._-]{1,123}")
_class = _matching(r"[A-Za-z_][A-Za-z0-9_.]{0,63}")
_route = _matching(r"(/([A-Za-z0-9._-]|\{[a-z_:]+\})*){1,12}")
_replica = _matching(r"[0-9]{1,6}(\.[0-9]{1,6})?")
model_form = _matching(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}")
_method = _word(*METHODS, other="_OTHER")
_finish = _word("stop", "length", "tool_calls", "content_filter", "abort", "error")
_reason = _matching(r"[a-z][a-z_]{0,47}")
_hex = _matching(r"[0-9a-f]{16}|[0-9a-f]{32}")

# Of spans. `models` marks what is looked up among the served ones.
ATTRIBUTES: Mapping[str, Form] = MappingProxyType(
    {
        "http.request.method": _method,
        "http.route": _route,
        "http.response.status_code": _integer,
        "error.type": _matching(r"[A-Za-z_][A-Za-z0-9_.]{0,63}|[1-5][0-9]{2}"),
        "gen_ai.operation.name": _word(*OPERATIONS),
        "gen_ai.provider.name": _word("footplate"),
        "gen_ai.request.model": model_form,
        "gen_ai.response.model": model_form,
        "gen_ai.request.max_tokens": _integer,
        "gen_ai.request.choice.count": _integer,
        "gen_ai.request.temperature": _number,
        "gen_ai.request.top_p": _number,
        "gen_ai.request.top_k": _integer,
        "gen_ai.request.frequency_penalty": _number,
        "gen_ai.request.presence_penalty": _number,
        "gen_ai.request.stream": _flag,
        "gen_ai.response.finish_reasons": _each(_finish),
        "gen_ai.response.time_to_first_chunk": _number,
        "gen_ai.usage.input_tokens": _integer,
        "gen_ai.usage.output_tokens": _integer,
        "gen_ai.usage.cache_read.input_tokens": _integer,
        "footplate.request.id": _request_id,
        "footplate.tenant.id": _identifier,
        "footplate.key.id": _identifier,
        "footplate.batch.id": _identifier,
        "footplate.replica": _replica,
        "footplate.outcome": _word(
            "answered", "left", "refused", "failed", "moved", "lost", "client_cancelled", "completed"
        ),
        "footplate.reason": _reason,
        "footplate.retry_count": _integer,
        "footplate.prompts": _integer,
        "footplate.attempts_left_out": _integer,
    }
)
# Of the process that tells.
RESOURCE: Mapping[str, Form] = MappingProxyType(
    {
        "service.name": _word("footplate-gateway", "footplate-engine", "footplate-serve"),
        "service.namespace": _word("footplate"),
        "service.version": _identifier,
        "service.instance.id": _identifier,
        "gen_ai.request.model": model_form,
        "footplate.replica": _replica,
    }
)
# Of log lines. Nothing that a client wrote has a name here. `error` is the name of an exception's class;
# `event` is a sentence of our code, which no form but a bound can hold to.
LOG_FIELDS: Mapping[str, Form] = MappingProxyType(
    {
        "event": _matching(r"(?s).{0,512}"),
        "level": _word("debug", "info", "warning", "error", "critical"),
        "logger": _matching(r"[A-Za-z_][A-Za-z0-9_.]{0,127}"),
        "process": _word("gateway", "engine", "serve"),
        "timestamp": _matching(r"[0-9T:.Z+-]{1,40}"),
        "request_id": _request_id,
        "status": _integer,
        "sent_status": _integer,
        "type": _reason,
        "code": _reason,
        "error": _class,
        "model": model_form,
        "route": _route,
        "where": _each(_matching(r"[\w.<>-]{1,80}:[0-9]{1,7} [\w.<>]{1,80}")),
        "trace_id": _hex,
        "span_id": _hex,
    }
)
LABELS: Mapping[str, Form] = MappingProxyType(
    {
        "model_name": model_form,
        "model": model_form,
        "route": model_form,
        "engine": _replica,
        "le": _matching(r"[0-9.e+-]{1,24}|\+Inf"),
        "reason": _reason,
        "kind": _reason,
        "outcome": _reason,
        "status": _reason,
        "use": _reason,
        "token_class": _reason,
        "signal": _word("traces", "metrics", "logs"),
        "finished_reason": _finish,
        "block_size": _matching(r"[0-9]{1,9}"),
        "num_gpu_blocks": _matching(r"[0-9]{1,12}"),
        "gen_ai_operation_name": _word(*OPERATIONS),
        "gen_ai_provider_name": _word("footplate"),
        "gen_ai_request_model": model_form,
        "gen_ai_response_model": model_form,
        "error_type": _class,
    }
)
MODELS = frozenset(
    {
        *("gen_ai.request.model", "gen_ai.response.model", "gen_ai_request_model", "gen_ai_response_model"),
        *("model", "model_name", "route"),
    }
)


class AllowList:
    """The list, with the names of models that are served by now."""

    def __init__(self, known_models: Callable[[], Container[str]] = frozenset) -> None:
        self.known_models = known_models
        # None: whatever has a route's form. What a client wrote in a path can have it.
        self.known_routes: Container[str] | None = None

    def attribute(self, name: str, value: Any, names: Mapping[str, Form] = ATTRIBUTES) -> Value | None:
        """A value as it may leave under a name; None: not at all."""
        form = names.get(name)
        if form is None:
            return None
        if name in MODELS and form is model_form:
            return self.model(value)
        if form is _route and not self._is_known(value):
            return None
        return form(value)

    def model(self, name: Any) -> Value | None:
        """A model's or a route's name; one that nothing is served under is `_unknown`."""
        if not isinstance(name, str):
            return None
        return model_form(name) if name in self.known_models() else UNKNOWN

    def _is_known(self, route: Any) -> bool:
        return self.known_routes is None or (isinstance(route, str) and route in self.known_routes)

    def span_name(self, verb: str, subject: str = "") -> str:
        """`chat MODEL`, `POST /ROUTE`, or a name of ours; `other` for anything else."""
        if verb in OPERATIONS:
            return f"{verb} {self.model(subject)}"
        if verb in METHODS:
            return f"{verb} {subject}" if _route(subject) and self._is_known(subject) else verb
        return verb if verb in SPANS else "other"

    def event_name(self, name: str) -> str:
        """A name of ours, or `other`."""
        return name if name in EVENTS else "other"

    def log_line(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """A log line's fields; None stays, since it says that there is none."""
        line: dict[str, Any] = {}
        for name, value in fields.items():
            if name not in LOG_FIELDS:
                continue
            kept = None if value is None else self.attribute(name, value, LOG_FIELDS)
            if kept is not None or value is None:
                line[name] = list(kept) if isinstance(kept, tuple) else kept
        return line

    def labels(self, given: Mapping[str, str]) -> dict[str, str] | None:
        """A series' labels; None: one of them may not leave, and so the series may not."""
        found = {}
        for name, value in given.items():
            # An empty label is none, to Prometheus.
            kept = "" if value == "" else self.attribute(name, value, LABELS)
            if not isinstance(kept, str):
                return None
            found[name] = kept
        return found


def allowed_names() -> Iterable[str]:
    """Every name of an attribute, a field or a label."""
    return {*ATTRIBUTES, *RESOURCE, *LOG_FIELDS, *LABELS}
