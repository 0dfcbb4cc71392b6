"""A model that is shut down and let go gives its memory back."""

from __future__ import annotations

import gc
import weakref

from footplate.engine.llm import LLM
from footplate.engine.types import SamplingParams
from tests.engine.conftest import SMOLLM2


def test_an_llm_that_is_let_go_leaves_nothing() -> None:
    llm = LLM(SMOLLM2, kv_cache_gib=0.05, max_model_len=64)
    assert llm.generate(["Hello"], SamplingParams(max_tokens=1))[0].token_ids
    gone = weakref.ref(llm)
    llm.shutdown()
    del llm
    gc.collect()
    assert gone() is None
    assert gc.get_freeze_count() == 0
