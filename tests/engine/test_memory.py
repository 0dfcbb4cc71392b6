"""Memory is taken within the group's limit, and given back by a model that is let go."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from footplate.engine.llm import LLM
from footplate.engine.memory import available_bytes
from footplate.engine.runner.model_runner import logit_rows
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


@pytest.mark.parametrize(("vocab_size", "expected"), [(1_000, 64), (262_144, 16), (10**9, 1)])
def test_a_prompts_log_probabilities_take_as_much_memory_whatever_the_vocabulary(
    vocab_size: int, expected: int
) -> None:
    assert logit_rows(vocab_size) == expected


@pytest.mark.parametrize(
    ("group", "folder", "limits", "expected"),
    [
        ("0::/pod/engine", "pod/engine", {"memory.max": "900", "memory.current": "400"}, 550),
        ("0::/pod/engine", "pod", {"memory.max": "900", "memory.current": "1000"}, 0),
        # In a container its own group is what is mounted, whatever the host calls it.
        ("0::/host/of/it", ".", {"memory.max": "900", "memory.current": "400"}, 550),
        ("0::/pod", "pod", {"memory.max": "max", "memory.current": "400"}, 8192),
        ("4:cpu,memory:/pod", "memory/pod", {"limit_in_bytes": "900", "usage_in_bytes": "400"}, 550),
        ("4:cpu:/pod", ".", {}, 8192),
    ],
)
def test_what_can_be_had_is_within_the_limit_of_every_group(
    tmp_path: Path, group: str, folder: str, limits: dict[str, str], expected: int
) -> None:
    """Else a pool would be sized by the machine, and its engine killed each time that the pool fills."""
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 16 kB\nMemAvailable: 8 kB\n")
    (proc / "self/cgroup").write_text(f"{group}\n")
    (groups / folder).mkdir(parents=True)
    for name, value in limits.items():
        file = name if name.startswith("memory.") else f"memory.{name}"
        (groups / folder / file).write_text(f"{value}\n")
    prefix = "" if group.startswith("0::") else "total_"
    (groups / folder / "memory.stat").write_text(f"{prefix}active_file 20\n{prefix}inactive_file 30\n")
    assert available_bytes(proc, groups) == expected
