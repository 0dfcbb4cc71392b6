"""Every kernel that is launched, and what runs it in tests: an interpreter on any machine, or only a GPU.

A kernel is a function under `@triton.jit` or `@gluon.jit` that no other such function calls or is handed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import footplate.engine

ENGINE = Path(footplate.engine.__file__).parent
TESTS = Path(__file__).parents[2]

# By module and name: the pair that launches it in Triton's interpreter (tests/engine/kernels/test_pairs.py).
INTERPRETED = {
    "kernels.attention.kernel:prefill_kernel": "attention/triton",
    "kernels.attention.kernel:decode_kernel": "attention/triton-decode",
    "kernels.attention.kernel:merge_kernel": "attention/triton-prefix",
    "kernels.attention.kernel:prefix_kernel": "attention/triton-prefix",
    "kernels.block_copy.kernel:_block_copy_kernel": "block_copy/triton",
    "kernels.decode_step.kernel:_decode_inputs_kernel": "decode_step/triton",
    "kernels.embedding.kernel:_embedding_kernel": "embedding/triton",
    "kernels.gated_activation.kernel:_gated_activation_kernel": "gated_activation/triton",
    "kernels.rms_norm.kernel:_rms_norm_kernel": "rms_norm/triton",
    "kernels.rope_and_cache.kernel:_rope_and_cache_kernel": "rope_and_cache/triton",
    "kernels.sample.kernel:_scan_kernel": "sample/triton",
    "kernels.sample.kernel:_gather_kernel": "sample/triton",
    "kernels.sample.kernel:_finish_kernel": "sample/triton",
    "kernels.skinny_linear.kernel:_linear_kernel": "skinny_linear/triton",
    "kernels.skinny_linear.kernel:_gate_up_kernel": "skinny_linear/triton-gate-up",
    "kernels.skinny_linear.kernel:_qkv_kernel": "skinny_linear/triton-qkv",
    "kernels.streamed_linear.kernel:_streamed_kernel": "streamed_linear/triton",
}
# It measures, and is of no op; the test that runs it.
_CEILINGS = "engine/bench/test_ceilings.py::test_the_reading_kernel_reads_what_it_says"
MEASURING = {"bench.read_kernel:_read_kernel": _CEILINGS}
# In Gluon, with Hopper's own instructions: no interpreter runs these. The test on a GPU that covers each;
# tests/gpu/test_kernels.py sees to it that they are what runs there.
_PROMPTS = "gpu/test_kernels.py::test_prompts_of_the_commonest_head_sizes_agree"
_PAIRS = "gpu/test_kernels.py::test_kernel_agrees_with_its_reference"
HOPPER_ONLY = {
    "kernels.attention.hopper.kernel:prefill_kernel": _PROMPTS,
    "kernels.attention.specialised.kernel:prefill_kernel": _PROMPTS,
    "kernels.streamed_linear.hopper.kernel:streamed_kernel": _PAIRS,
    "kernels.streamed_block.hopper.kernel:block_kernel": _PAIRS,
}


def find_kernels(folder: Path = ENGINE) -> set[str]:
    """All kernels in a folder's Python files, as `module:name`, the module as seen from the folder."""
    device_code = [
        (path, node)
        for path in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and any(map(_is_jit, node.decorator_list))
    ]
    helpers = {name for _, function in device_code for name in _names_in(function)}
    return {
        f"{'.'.join(path.relative_to(folder).with_suffix('').parts)}:{function.name}"
        for path, function in device_code
        if function.name not in helpers
    }


def _is_jit(decorator: ast.expr) -> bool:
    made = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(made) in ("triton.jit", "gluon.jit", "jit")


def _names_in(function: ast.FunctionDef) -> Iterator[str]:
    for statement in function.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                yield node.id
            elif isinstance(node, ast.Attribute):
                yield node.attr


def has_test(place: str) -> bool:
    """Whether `file::function` is a test, from the folder of all tests."""
    file, _, name = place.partition("::")
    parsed = ast.parse((TESTS / file).read_text())
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in parsed.body)
