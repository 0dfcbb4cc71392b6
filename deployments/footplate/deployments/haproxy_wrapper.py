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
# Of one client that doesn't read, in the kernel, at each of HAProxy's two sockets; it would else take 4 MB.
SOCKET_BYTES = 256 << 10
# By these a client could steer Serve past our rules on time-outs and disconnects.
_SERVE_HEADERS = ("x-request-timeout-seconds", "x-request-disconnect-disabled", "serve_multiplexed_model_id")
_REASONS = {
    400: "Bad Request",
    408: "Request Timeout",
    413: "Content Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
}
# HAProxy can't tell a half-closed client from one that has left, and treats both so.
_LEFT = (
    "The request can't be read as HTTP, or its connection was closed for sending before the answer was "
    "ready; keep it open until then."
)
_TIMEOUT = f"The request's head did not arrive within {HEADERS_S} s."
_TOO_LARGE = "The request is larger than this server takes."
_NOT_IMPLEMENTED = "The request asks for something that this server doesn't do."
_FAILED = "The server failed to answer this request."
_BROKEN = "The connection to the gateway broke before it answered; try again."
_UNAVAILABLE = "No gateway is running now; try again."
_NO_METHOD = "!{ method GET HEAD POST PUT PATCH DELETE OPTIONS }"
# Tells the gateway the client's address.
SOURCE_HEADER = "x-forwarded-for"
# Ends each line of ours, so that a second run finds them.
_MARK = "  # footplate"


def write_wrapper(folder: Path, ports: RunPorts, haproxy: Path) -> Path:
    """Write the program and what it needs into `folder`; gives the program's path."""
    answers = {
        400: _answer(400, _LEFT, None),
        408: _answer(408, _TIMEOUT, "request_timeout"),
        413: _answer(413, _TOO_LARGE, "request_too_large"),
        500: _answer(500, _FAILED, "server_error"),
        501: _answer(501, _NOT_IMPLEMENTED, "server_error"),
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
    unavailable = json.dumps(_body(503, _UNAVAILABLE, "server_is_overloaded"))
    limits = [f"tune.sndbuf.client {SOCKET_BYTES}", f"tune.rcvbuf.server {SOCKET_BYTES}"]
    return (
        f"/{_MARK}$/d\n"
        # The template binds statistics and metrics to all interfaces.
        f"s/bind :{ports.haproxy_metrics}$/bind 127.0.0.1:{ports.haproxy_metrics}/\n"
        f"s/bind \\*:{ports.haproxy_stats}$/bind 127.0.0.1:{ports.haproxy_stats}/\n"
        # It would tell a system log every URL, with queries and names of models that clients made up.
        "/^ *log .* local0 info$/d\n"
        # HAProxy 2.8 stops reading a client whose body it has spliced: it never sees that one leave and spins
        # on the unread end until the answer comes. Bodies and events are too small to gain from splicing.
        "/option splice-/d\n"
        # Without it a client may take an hour over its headers.
        "/^ *timeout http-request /d\n"
        + _after("    timeout client .*", [f"timeout http-request {HEADERS_S}s"])
        # Its own answers in the API's shape, in place of Serve's plain texts.
        + "/^ *errorfile /d\n"
        + _after("    balance .*", [f"errorfile {status} {folder}/{status}.http" for status in statuses])
        + "s|^    http-request return status 404 .*$|    http-request return status 503"
        f" content-type application/json hdr retry-after 1 string '{unavailable}'|\n"
        + _after("global", limits)
        + _after("frontend http_frontend", _frontend_rules())
    )


def _frontend_rules() -> list[str]:
    # Serve's own pages tell of applications and need no key; its probes ask the replicas, not here.
    missing = _body(404, "There is no such URL here.", "unknown_url")
    rules = [
        _refusal(404, missing, "{ path,url_dec -m beg /-/ }"),
        # The gateway's HTTP parser would answer these two by itself, in words of its own.
        _refusal(405, _body(405, "This URL does not answer this method.", "method_not_allowed"), _NO_METHOD),
        _refusal(
            400,
            _body(400, "WebSockets are not spoken here.", None),
            "{ req.hdr(upgrade) -i -m str websocket }",
        ),
    ]
    rules += [f"http-request del-header {name}" for name in _SERVE_HEADERS]
    # In place of whatever the client wrote there: audit records say where a change came from.
    rules.append(f"http-request set-header {SOURCE_HEADER} %[src]")
    # The gateway names each request; Serve adds a second id after it, or the one that the client sent.
    rules.append("http-request del-header x-request-id")
    has_id = "{ res.hdr(x-request-id) -m found }"
    rules.append(f"http-response set-header x-request-id %[res.hdr(x-request-id,1)] if {has_id}")
    for name, value in (("x-request-id", "req_%[uuid]"), ("openai-processing-ms", "0")):
        rules.append(f"http-after-response set-header {name} {value} if !{{ res.hdr({name}) -m found }}")
    return rules


def _refusal(status: int, body: dict[str, dict[str, str | None]], condition: str) -> str:
    return (
        f"http-request return status {status} content-type application/json string '{json.dumps(body)}'"
        f" if {condition}"
    )


def _after(line: str, added: list[str]) -> str:
    return f"s~^{line}$~&" + "".join(f"\\\n    {text}{_MARK}" for text in added) + "~\n"


def _body(status: int, message: str, code: str | None) -> dict[str, dict[str, str | None]]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _answer(status: int, message: str, code: str | None, headers: str = "") -> bytes:
    body = json.dumps(_body(status, message, code))
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n{headers}\r\n{body}".encode()
