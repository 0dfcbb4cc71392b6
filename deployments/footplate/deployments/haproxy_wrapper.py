"""A program that mends Serve's HAProxy configuration and then becomes HAProxy.

Serve writes the file from a template of its own and starts the program it is told to with `-f FILE`. What is
mended here has no switch in the template; the program has one.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path

from footplate.deployments.ports import RunPorts

HEADERS_S = 30  # for a request's head alone; its body has a deadline of its own at the gateway
# By these a client could steer Serve past our rules on time-outs and disconnects.
_SERVE_HEADERS = ("x-request-timeout-seconds", "x-request-disconnect-disabled", "serve_multiplexed_model_id")
_REASONS = {
    400: "Bad Request",
    408: "Request Timeout",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_TIMEOUT = f"The request's head did not arrive within {HEADERS_S} s."
_BROKEN = "The connection to the gateway broke before it answered; try again."
_UNAVAILABLE = "No gateway is running now; try again."


def write_wrapper(folder: Path, ports: RunPorts, haproxy: Path) -> Path:
    """Write the program and what it needs into `folder`; gives the program's path."""
    answers = {
        400: _answer(400, "The request can't be read as HTTP.", None),
        408: _answer(408, _TIMEOUT, "request_timeout"),
        502: _answer(500, _BROKEN, "server_error"),
        503: _answer(503, _UNAVAILABLE, "server_is_overloaded", "Retry-After: 1\r\n"),
        504: _answer(500, _BROKEN, "server_error"),
    }
    for status, answer in answers.items():
        (folder / f"{status}.http").write_bytes(answer)
    edits = folder / "edits.sed"
    edits.write_text(_edits(folder, ports, list(answers)))
    wrapper = folder / "haproxy"
    wrapper.write_text(
        "#!/bin/sh\n"
        'previous=""\n'
        'for argument in "$@"; do\n'
        f'  if [ "$previous" = "-f" ]; then sed -i -f "{edits}" "$argument"; fi\n'
        '  previous="$argument"\n'
        "done\n"
        f'exec "{haproxy}" "$@"\n'
    )
    wrapper.chmod(stat.S_IRWXU)
    return wrapper


def _edits(folder: Path, ports: RunPorts, statuses: list[int]) -> str:
    """A sed script. It may run twice on one file."""
    errors = "\\\n".join(f"    errorfile {status} {folder}/{status}.http" for status in statuses)
    unavailable = json.dumps(_body(503, _UNAVAILABLE, "server_is_overloaded"))
    rules = [f"http-request del-header {name}" for name in _SERVE_HEADERS]
    # The gateway names each request; Serve adds a second id after it, or the one that the client sent.
    rules.append("http-request del-header x-request-id")
    rules.append("http-response set-header x-request-id %[res.hdr(x-request-id,1)]")
    for name, value in (("x-request-id", "req_%[uuid]"), ("openai-processing-ms", "0")):
        rules.append(f"http-after-response set-header {name} {value} if !{{ res.hdr({name}) -m found }}")
    frontend = "\\\n".join(f"    {rule}" for rule in rules)
    return (
        # The template binds statistics and metrics to all interfaces.
        f"s/bind :{ports.haproxy_metrics}$/bind 127.0.0.1:{ports.haproxy_metrics}/\n"
        f"s/bind \\*:{ports.haproxy_stats}$/bind 127.0.0.1:{ports.haproxy_stats}/\n"
        # HAProxy 2.8 stops reading a client whose body it has spliced: it never sees that one leave and spins
        # on the unread end until the answer comes. Bodies and events are too small to gain from splicing.
        "/option splice-/d\n"
        # Without it a client may take an hour over its headers.
        "/^ *timeout http-request /d\n"
        f"s/^    timeout client .*$/&\\\n    timeout http-request {HEADERS_S}s/\n"
        # Its own answers in the API's shape, in place of Serve's plain texts.
        "/^ *errorfile /d\n"
        f"s|^    balance .*$|&\\\n{errors}|\n"
        "s|^    http-request return status 404 .*$|    http-request return status 503"
        f" content-type application/json hdr retry-after 1 string '{unavailable}'|\n"
        f"s|^frontend http_frontend$|&\\\n{frontend}|\n"
    )


def _body(status: int, message: str, code: str | None) -> dict[str, dict[str, str | None]]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _answer(status: int, message: str, code: str | None, headers: str = "") -> bytes:
    body = json.dumps(_body(status, message, code))
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n{headers}\r\n{body}".encode()
