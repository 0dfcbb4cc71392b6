"""A real `footplate serve` as a child process with its own data folder and port: for e2e, clients, chaos."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from footplate.deployments.leftovers import is_alive, is_writing_under, wait_until
from footplate.deployments.ports import find_free_port
from footplate.deployments.run_paths import RunPaths

SMALL = "smollm2-135m"
BASE = "gemma3-270m"
START_S = 120.0
STOP_S = 30.0
FOOTPLATE = Path(sys.executable).with_name("footplate")


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without settings of a developer's own platform."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FOOTPLATE_")}
    return {**kept, "PYTHONUNBUFFERED": "1", **more}


@dataclass
class ServeProcess:
    """One run. Start it with `launch`; `stop` or `kill` must follow."""

    data_dir: Path
    url: str
    child: subprocess.Popen[bytes]

    @classmethod
    def launch(cls, data_dir: Path, config: Path | None = None) -> ServeProcess:
        """Start and wait until it says that it is ready."""
        data_dir.mkdir(parents=True, exist_ok=True)
        port = find_free_port()
        command = [str(FOOTPLATE), "serve", "--port", str(port), "--data-dir", str(data_dir)]
        output = data_dir / "output"
        with open(output, "wb") as log:
            child = subprocess.Popen(
                [*command, *(("--config", str(config)) if config else ())],
                env=clean_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C at the tests must not reach it before the fixtures do.
                start_new_session=True,
            )
        served = cls(data_dir, f"http://127.0.0.1:{port}", child)
        wait_until(lambda: served.has_said("ready: ") or child.poll() is not None, START_S, every_s=0.1)
        if not served.has_said(f"ready: {served.url}\n"):
            text = output.read_text(errors="replace")[-3000:]
            served.stop(is_checked=False)
            raise AssertionError(f"footplate serve did not get ready: {text}")
        return served

    def has_said(self, text: str) -> bool:
        """Whether its output holds this text by now."""
        return text in (self.data_dir / "output").read_text(errors="replace")

    def stop(self, *, is_checked: bool = True) -> None:
        """SIGTERM; it must end cleanly within the deadline and leave no process and no run folder."""
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
        try:
            code = self.child.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            # The keeper ends the rest.
            self.child.kill()
            code = self.child.wait()
        is_gone = wait_until(lambda: not self.processes(), 10)
        if is_checked:
            assert code == 0, (self.data_dir / "output").read_text(errors="replace")[-3000:]
            assert is_gone, self.processes()
            assert not RunPaths.of(self.data_dir).run_dir.exists()

    def kill(self) -> None:
        """kill -9 of the serve process alone."""
        self.child.kill()
        self.child.wait()

    def processes(self) -> dict[int, str]:
        """Every process that names a folder of the run, writes in one or has its mark: id and command."""
        paths = RunPaths.of(self.data_dir)
        needles = (
            os.fsencode(self.data_dir),
            os.fsencode(paths.run_dir),
            f"FOOTPLATE_INSTANCE={paths.mark}".encode(),
        )
        found = {}
        for entry in os.listdir("/proc"):
            if not entry.isdecimal() or int(entry) == os.getpid() or not is_alive(int(entry)):
                continue
            command, environment = _read(entry, "cmdline"), _read(entry, "environ")
            is_named = any(needle in command or needle in environment for needle in needles)
            if is_named or is_writing_under(os.fsencode(paths.run_dir) + b"/", int(entry)):
                found[int(entry)] = command.replace(b"\0", b" ").decode(errors="replace").strip()
        return found

    def pids(self, title: str) -> list[int]:
        """Processes of this run whose command holds a text."""
        return sorted(pid for pid, command in self.processes().items() if title in command)

    def engine_pids(self) -> list[int]:
        return self.pids(":Engine")

    def gateway_pids(self) -> list[int]:
        return self.pids(":Gateway")

    def key(self, name: str = "tenant") -> str:
        """A key that the first start made: admin, tenant or scrape."""
        return (self.data_dir / "keys" / f"{name}.key").read_text().strip()

    def http(self, key: str | None = "tenant", timeout_s: float = 60) -> httpx.Client:
        """A client with a key of that name."""
        headers = {"authorization": f"Bearer {self.key(key)}"} if key else {}
        # No certificates to load: that would cost more than most requests.
        return httpx.Client(
            base_url=self.url, headers=headers, timeout=timeout_s, trust_env=False, verify=False
        )

    def metrics(self) -> str:
        """The text of /metrics; empty while it doesn't answer."""
        try:
            with self.http("scrape", timeout_s=5) as http:
                response = http.get("/metrics")
        except httpx.HTTPError:
            return ""
        return response.text if response.status_code == 200 else ""

    def metric(self, name: str, model: str = SMALL, **labels: str) -> float:
        """A metric's sum over the series of a model; NaN when there is none."""
        values = list(_values(self.metrics(), name, {"model_name": model, **labels}))
        return sum(values) if values else float("nan")

    def is_idle(self) -> bool:
        """Whether every model says that it runs nothing, keeps nothing waiting and holds no KV blocks."""
        text = self.metrics()
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        by_name = [list(_values(text, name, {})) for name in names]
        return all(by_name) and not any(map(any, by_name))

    def await_idle(self, timeout_s: float) -> None:
        """Statistics come twice a second, so this can take half a second even when all has ended."""
        assert wait_until(self.is_idle, timeout_s, every_s=0.05), [
            line for line in self.metrics().splitlines() if re.match(r"vllm:(num_requests|kv_cache_u)", line)
        ]

    def await_settled(self, name: str = "vllm:generation_tokens_total", timeout_s: float = 10) -> None:
        """Wait until a whole round of statistics has brought nothing new: they lag behind the answers."""

        def is_settled() -> bool:
            before = self.metric(name)
            return not wait_until(lambda: self.metric(name) != before, 0.7)

        assert wait_until(is_settled, timeout_s)

    def await_running(self, model: str = SMALL, timeout_s: float = 20, least: int = 1) -> None:
        """Wait until the engine works on something."""
        assert wait_until(lambda: self.metric("vllm:num_requests_running", model) >= least, timeout_s)


def run_all(jobs: list[Any], timeout_s: float = 120) -> None:
    """Run callables side by side; the first failure is raised."""
    failures: list[BaseException] = []

    def guarded(job: Any) -> None:
        try:
            job()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=timeout_s)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


def _values(text: str, name: str, labels: dict[str, str]) -> Iterator[float]:
    for line in text.splitlines():
        if line.startswith(name + "{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            yield float(line.rpartition(" ")[2])


def _read(pid: str, name: str) -> bytes:
    try:
        return Path("/proc", pid, name).read_bytes()
    except OSError:
        return b""
