"""The mended HAProxy configuration, held against the template of the Ray that is installed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from footplate.deployments.haproxy_wrapper import write_wrapper
from footplate.deployments.ports import RunPorts

PORTS = RunPorts(8000, 9101, 8404, 8500, 20_000, 20_099)
# The lines of Serve's template that are mended or mended at; the next test finds them in the template itself.
TEMPLATE_LINES = (
    "global\n",
    "    log {{ config.log_target }} local0 info\n",
    "    option splice-request",
    "    option splice-response",
    "    errorfile 503 {{ config.error_file_path }}",
    "    balance {{ config.balance_algorithm }}",
    "frontend http_frontend\n",
    "    http-request return status 404",
    "timeout client {{ config.timeout_client_s }}s",
    "    bind :{{ config.metrics_port }}",
)
CONFIG = """\
global
    log 127.0.0.1:514 local0 info
    maxconn 100
defaults
    mode http
    timeout client 3600s
    option abortonclose
    option splice-request
    option splice-response
    errorfile 502 /nowhere
    errorfile 503 /nowhere
    balance leastconn
frontend prometheus
    bind :9101
    mode http
frontend http_frontend
    bind 127.0.0.1:8000
    default_backend default_backend
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path '%[path]' not found."
listen stats
  bind *:8404
"""


@pytest.fixture
def mended(tmp_path: Path) -> str:
    """The configuration after the program has been started on it twice, as at a reload."""
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG)
    wrapper = write_wrapper(tmp_path, PORTS, Path("/bin/true"))
    for _ in range(2):
        subprocess.run([wrapper, "-db", "-f", config], check=True)
    return config.read_text()


@pytest.mark.ray
def test_the_installed_template_holds_the_lines_that_are_mended() -> None:
    templates = pytest.importorskip("ray.serve._private.haproxy_templates")
    for line in TEMPLATE_LINES:
        assert line in templates.HAPROXY_CONFIG_TEMPLATE


def test_clients_are_read_to_their_end_and_must_send_their_head_in_time(mended: str) -> None:
    assert "option abortonclose" in mended
    assert "splice" not in mended
    assert mended.count("timeout http-request 30s") == 1


def test_nothing_but_the_entrance_is_bound_beyond_loopback(mended: str) -> None:
    assert [line.split()[1] for line in mended.splitlines() if line.strip().startswith("bind")] == [
        "127.0.0.1:9101",
        "127.0.0.1:8000",
        "127.0.0.1:8404",
    ]


def test_the_proxys_own_answers_have_the_apis_shape(mended: str) -> None:
    lines = [line.split() for line in mended.splitlines()]
    files = {int(line[1]): Path(line[2]) for line in lines if line[:1] == ["errorfile"]}
    assert set(files) == {400, 408, 413, 500, 501, 502, 503, 504}
    for path in files.values():
        head, _, body = path.read_bytes().partition(b"\r\n\r\n")
        assert f"Content-Length: {len(body)}".encode() in head.split(b"\r\n")
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert mended.count("status 404") == 1 and "path,url_dec -m beg /-/" in mended
    assert "%[path]" not in mended


def test_a_second_run_changes_nothing(tmp_path: Path, mended: str) -> None:
    subprocess.run([tmp_path / "haproxy", "-f", tmp_path / "haproxy.cfg"], check=True)
    assert (tmp_path / "haproxy.cfg").read_text() == mended


def test_clients_can_not_steer_serve_by_its_headers(mended: str) -> None:
    for name in ("x-request-timeout-seconds", "x-request-disconnect-disabled", "x-request-id"):
        assert f"http-request del-header {name}  # footplate\n" in mended


def test_clients_can_not_say_where_they_call_from(mended: str) -> None:
    assert mended.count("http-request set-header x-forwarded-for %[src]") == 1


def test_no_url_is_told_to_a_system_log(mended: str) -> None:
    """Lines would hold queries, with keys that clients put there, and names of models they made up."""
    assert "log 127.0.0.1:514" in CONFIG
    assert not [line for line in mended.splitlines() if line.split()[:1] == ["log"]]
