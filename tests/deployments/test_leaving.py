"""A node that is about to be taken away: the notice on it, and the cloud's."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from footplate.deployments.errors import StartupError
from footplate.deployments.leaving import (
    notice_file,
    read_notice,
    seconds_left,
    streams_end_after_s,
    write_notice,
)
from footplate.deployments.node_drain import await_notice, is_own, spot_notice

NOTICE = '{"action": "terminate", "time": "2027-03-01T10:02:00Z"}'


def test_a_notice_is_for_one_node_and_may_be_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert read_notice(notice_file(folder, "a")) is None
    for ends_at in (1234.5, 1200.25):
        write_notice(notice_file(folder, "a"), ends_at)
        assert read_notice(notice_file(folder, "a")) == ends_at
    assert read_notice(notice_file(folder, "b")) is None
    assert [path.name for path in folder.iterdir()] == ["leaving-a"]


def test_streams_end_before_the_node_does() -> None:
    assert streams_end_after_s(120.0) == 115.0
    assert streams_end_after_s(8.0) == 6.0


def test_what_aws_leaves_a_spot_instance() -> None:
    now = datetime(2027, 3, 1, 10, 0, tzinfo=UTC)
    assert seconds_left(NOTICE, now) == 120.0
    assert seconds_left(NOTICE, now.replace(hour=11)) == 0.0
    assert seconds_left('{"action": "stop", "time": "2027-03-01T10:00:30"}', now) == 30.0
    for other in ("{}", "null", "no JSON", '{"time": "soon"}', '{"time": 3}'):
        with pytest.raises(ValueError, match=r".+"):
            seconds_left(other, now)


class Metadata(http.server.BaseHTTPRequestHandler):
    """Instance metadata as IMDSv2 gives it; `answer` is the spot instance's."""

    answer = (404, "")

    def do_PUT(self) -> None:
        self._say(*((200, "the token") if self.path == "/latest/api/token" else (404, "")))

    def do_GET(self) -> None:
        has_token = self.headers["X-aws-ec2-metadata-token"] == "the token"
        is_asked = self.path == "/latest/meta-data/spot/instance-action"
        self._say(*(type(self).answer if has_token and is_asked else (401, "")))

    def log_message(self, *_: object) -> None: ...

    def _say(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@contextmanager
def metadata(status: int, text: str) -> Iterator[str]:
    handler = type("Handler", (Metadata,), {"answer": (status, text)})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_the_notice_is_read_as_imds_gives_it() -> None:
    with metadata(404, "") as url:
        assert spot_notice(url) is None
    with metadata(200, '{"action": "terminate", "time": "2020-01-01T00:00:00Z"}') as url:
        assert spot_notice(url) == 0.0
    for status, text in ((500, ""), (200, "what?")):
        with metadata(status, text) as url, pytest.raises(StartupError):
            spot_notice(url)
    with pytest.raises(StartupError, match="hop limit"):
        spot_notice(url)


def test_a_notice_is_waited_for() -> None:
    answers = iter([None, None, 117.0])
    pauses: list[int] = []
    assert await_notice(lambda: next(answers), lambda: pauses.append(1)) == 117.0
    assert len(pauses) == 2


def test_a_process_knows_its_age() -> None:
    code = "import time; from footplate.deployments.node_drain import own_age_s as age; print(age())"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    took_s = time.monotonic() - began
    # Clock ticks are 10 ms.
    assert 0.05 < float(done.stdout) < took_s + 0.02


def test_an_address_is_known_for_this_machines_own() -> None:
    assert is_own("127.0.0.1")
    assert not is_own("192.0.2.1")
