"""On a GPU: every Triton kernel agrees with its reference, on the shared cases and on larger ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

from footplate.engine.kernels import cases
from footplate.engine.kernels.attention import launch
from footplate.engine.kernels.attention.reference import attention
from footplate.engine.kernels.attention.tiles import Splits, Tile, attention_tiles
from footplate.engine.kernels.ops import PrefixGroups
from footplate.engine.kernels.registry import PAIRS, KernelPair, triton_ops
from footplate.engine.kernels.streamed_pairs import HOPPER_PAIRS
from tests.engine.kernels.launched_kernels import HOPPER_ONLY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
TRITON_PAIRS = [pair for pair in PAIRS if "/triton" in pair.name] + list(HOPPER_PAIRS if IS_HOPPER else ())
CASES = [
    pytest.param(pair, case, id=f"{pair.name}-{case.id}") for pair in TRITON_PAIRS for case in pair.cases
]


@pytest.fixture(autouse=True)
def outputs_start_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.empty

    def poisoned(*size: Any, **options: Any) -> torch.Tensor:
        made = plain(*size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)


def on_gpu(value: Any) -> Any:
    """The value with every tensor in it on the GPU."""
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if isinstance(value, tuple) and hasattr(value, "_make"):  # a named one takes its items one by one
        return value._make(on_gpu(item) for item in value)
    if isinstance(value, tuple | list):
        return type(value)(on_gpu(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: on_gpu(getattr(value, f.name)) for f in fields(value)})
    return value


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors(item)


@pytest.mark.parametrize(("pair", "case"), CASES)
def test_kernel_agrees_with_its_reference(pair: KernelPair, case: Any) -> None:
    arguments = on_gpu(case.build())
    theirs, ours = copy.deepcopy(arguments), copy.deepcopy(arguments)
    expected, found = pair.reference(*theirs), pair.kernel(*ours)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, atol=pair.atol, rtol=pair.rtol)
    for changed, wanted in zip(tensors(ours), tensors(theirs), strict=True):
        torch.testing.assert_close(changed, wanted, atol=pair.atol, rtol=pair.rtol, equal_nan=True)


@pytest.mark.skipif(not IS_HOPPER, reason="kernels for Hopper")
@pytest.mark.parametrize("kernel", HOPPER_ONLY)
def test_what_no_interpreter_runs_is_what_runs_here(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the tests that are named beside these kernels do test them."""
    from triton.runtime.jit import JITFunction

    launched: set[str] = set()
    run = JITFunction.run

    def noted(made: Any, *args: Any, **options: Any) -> Any:
        launched.add(f"{made.fn.__module__.removeprefix('footplate.engine.')}:{made.fn.__name__}")
        return run(made, *args, **options)

    monkeypatch.setattr(JITFunction, "run", noted)
    if "attention" in kernel:
        head_dim = 128 if "specialised" in kernel else 64
        launch.attention(*attention_arguments(cases.AttentionShape(_CUT, head_dim=head_dim, kv_dtype=_HALF)))
    else:
        name = "streamed_block/hopper" if "streamed_block" in kernel else "streamed_linear/triton-16"
        pair = next(pair for pair in TRITON_PAIRS if pair.name == name)
        pair.kernel(*on_gpu(pair.cases[0].build()))
    assert kernel in launched


_HALF = torch.bfloat16
_DECODES = tuple((1, 500 + 37 * index) for index in range(70))
_LONG = ((1, 5000), (1, 17), (700, 3000), (1025, 1025), (3, 9000), (129, 129))
LARGE_SHAPES = {
    "decode": cases.AttentionShape(_DECODES, (32, 8), 128),
    "decode-one": cases.AttentionShape(((1, 20011),), (32, 8), 128),
    "decode-64": cases.AttentionShape(_DECODES, (32, 8), 64),
    "decode-64-window": cases.AttentionShape(((1, 5000), (1, 17), (1, 900)), (4, 2), 64, window=300),
    "decode-group-7": cases.AttentionShape(_DECODES[:9], (14, 2), 128),
    "mixed": cases.AttentionShape(_LONG, (8, 2), 128),
    "mixed-group-3": cases.AttentionShape(_LONG, (9, 3), 64),
    "mixed-group-7": cases.AttentionShape(_LONG, (7, 1), 128),
    "mixed-80": cases.AttentionShape(_LONG, (4, 4), 80),
    "mixed-96": cases.AttentionShape(_LONG, (4, 2), 96),
    "mixed-256": cases.AttentionShape(_LONG, (4, 1), 256),
    "mixed-short": cases.AttentionShape(((5, 5), (2, 2), (17, 17)), (8, 2), 128),
    "mixed-window": cases.AttentionShape(_LONG, (4, 1), 256, window=512),
    "mixed-soft-cap": cases.AttentionShape(_LONG, (8, 4), 128, window=1000, soft_cap=50.0),
}


PREFILL_TILES = {
    "128x128": Tile(128, 128, 8, 2),
    "128x64": Tile(128, 64, 8, 3),
    "64x64": Tile(64, 64, 4, 2),
    "overlapped-128x128": Tile(128, 128, 8, 2, True),
    "overlapped-128x64": Tile(128, 64, 8, 2, True),
    "overlapped-64x64": Tile(64, 64, 4, 2, True),
}


@pytest.mark.parametrize("tile", PREFILL_TILES)
@pytest.mark.parametrize("name", [n for n in LARGE_SHAPES if n.startswith("mixed")])
def test_every_prefill_tile_agrees(name: str, tile: str) -> None:
    shape = replace(LARGE_SHAPES[name], kv_dtype=torch.bfloat16)
    if shape.head_dim not in (64, 128):
        pytest.skip("tiles of this size are for head sizes 64 and 128")
    arguments = attention_arguments(shape)
    chosen = replace(attention_tiles(shape.head_dim, torch.bfloat16, (9, 0)), prefill=PREFILL_TILES[tile])
    found = launch.attention(*arguments, launch.AttentionOptions(tiles=chosen))
    torch.testing.assert_close(found, attention(*arguments), atol=4e-3, rtol=2**-6)


_CUT = ((33, 33), (48, 1000), (1, 129), (97, 2000), (5, 4096))
PROMPTS = {
    **{n: s for n, s in LARGE_SHAPES.items() if n.startswith("mixed") and s.head_dim in (64, 128)},
    **{
        f"blocks-{block_size}-{head_dim}": cases.AttentionShape(_CUT, (8, 2), head_dim, block_size=block_size)
        for block_size in launch.BLOCK_SIZES
        for head_dim in (64, 128)
    },
    "window-64": cases.AttentionShape(_LONG[2:], (8, 2), 64, window=300),
    "window-one": cases.AttentionShape(_CUT, (8, 2), 128, window=1),
    "window-soft-cap-64": cases.AttentionShape(_CUT, (6, 2), 64, window=70, soft_cap=20.0),
    "group-of-100": cases.AttentionShape(_CUT, (100, 1), 128),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_of_the_commonest_head_sizes_agree(name: str, dtype: torch.dtype) -> None:
    arguments = attention_arguments(replace(PROMPTS[name], kv_dtype=dtype))
    found = launch.attention(*arguments)
    torch.testing.assert_close(found, attention(*arguments), atol=4e-3, rtol=2**-6)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_prompts_agree_where_keys_and_values_share_a_tensor(head_dim: int) -> None:
    shape = cases.AttentionShape(_LONG, (8, 2), head_dim, kv_dtype=torch.bfloat16)
    q, spec, batch, kv = attention_arguments(shape)
    together = torch.stack(kv, dim=1)
    found = launch.attention(q, spec, batch, (together[:, 0], together[:, 1]))
    torch.testing.assert_close(found, attention(q, spec, batch, kv), atol=4e-3, rtol=2**-6)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_prompt_row_without_a_context_gives_zeros(head_dim: int) -> None:
    shape = replace(LARGE_SHAPES["decode"], head_dim=head_dim, kv_dtype=torch.bfloat16)
    q, spec, batch, kv = attention_arguments(shape)
    batch.context_lens[5:9] = 0
    batch.block_tables[5:9] = len(kv[0]) - 1  # of NaN, or of another row
    for cache in kv:
        cache[-1] = float("nan")
    found = launch.attention(q, spec, batch, kv, launch.AttentionOptions(deterministic=True))
    assert (found[5:9] == 0).all()


def attention_arguments(shape: cases.AttentionShape) -> tuple[Any, ...]:
    """Random queries, spec, batch and cache in the shape's cache type, on the GPU."""
    batch = cases.attention_batch(shape)
    kv = cases.filled_cache(shape, batch)
    generator = torch.Generator().manual_seed(11)
    q = torch.randn(len(batch.positions), shape.heads[0], shape.head_dim, generator=generator)
    made: tuple[Any, ...] = on_gpu((q.to(shape.kv_dtype), cases.attention_spec(shape), batch, kv))
    return made


@pytest.mark.parametrize("splits", [None, Splits(1, 64), Splits(4, 64), Splits(64, 64)])
def test_any_number_of_splits_agrees(splits: Splits | None) -> None:
    arguments = attention_arguments(replace(LARGE_SHAPES["decode"], kv_dtype=torch.bfloat16))
    found = launch.attention(*arguments, launch.AttentionOptions(splits=splits))
    torch.testing.assert_close(found, attention(*arguments), atol=4e-3, rtol=2**-6)


def test_whichever_program_merges_makes_the_same_bits() -> None:
    """Parts are merged by the program that happens to come last, in launches that share their counts."""
    shape = replace(LARGE_SHAPES["decode"], sequences=_DECODES[:8], kv_dtype=torch.bfloat16)
    arguments = attention_arguments(shape)
    workspace = launch.Workspace()
    for splits in (Splits(4, 64), Splits(16, 64)):
        options = launch.AttentionOptions(splits=splits)
        first = launch.attention(*arguments, options, workspace)
        torch.testing.assert_close(first, attention(*arguments), atol=4e-3, rtol=2**-6)
        for _ in range(300):
            assert torch.equal(launch.attention(*arguments, options, workspace), first)
    assert not workspace.counts(0, first.device).any()


def test_a_deterministic_decode_row_is_the_same_bits_in_every_batch() -> None:
    shape = replace(LARGE_SHAPES["decode"], kv_dtype=torch.bfloat16)
    q, spec, batch, kv = attention_arguments(shape)
    options = launch.AttentionOptions(deterministic=True)
    together = launch.attention(q, spec, batch, kv, options)
    for row in range(0, len(q), 9):
        own = replace(
            batch,
            query_starts=batch.query_starts[:2],
            context_lens=batch.context_lens[row : row + 1],
            block_tables=batch.block_tables[row : row + 1],
            num_decodes=1,
        )
        assert torch.equal(launch.attention(q[row : row + 1], spec, own, kv, options)[0], together[row])


@pytest.mark.parametrize("rows", [40, 200])
def test_a_shared_prefix_read_once_agrees(rows: int) -> None:
    shape = cases.AttentionShape(
        tuple((1, 700 + index) for index in range(rows)), (32, 8), 128, kv_dtype=torch.bfloat16
    )
    q, spec, batch, kv = attention_arguments(shape)
    batch.block_tables[3:, :40] = batch.block_tables[3, :40].clone()
    lens = torch.full((rows,), 640, dtype=torch.int32).cuda()
    lens[:3] = 0
    batch.prefix_groups = PrefixGroups(
        rows=torch.arange(3, rows, dtype=torch.int32).cuda(),
        starts=torch.tensor([0, rows - 3], dtype=torch.int32).cuda(),
        lens=torch.tensor([640], dtype=torch.int32).cuda(),
        row_lens=lens,
    )
    found = launch.attention(q, spec, batch, kv)
    torch.testing.assert_close(found, attention(q, spec, batch, kv), atol=4e-3, rtol=2**-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LARGE_SHAPES)
def test_long_contexts_agree(name: str, dtype: torch.dtype) -> None:
    arguments = attention_arguments(replace(LARGE_SHAPES[name], kv_dtype=dtype))
    found = triton_ops().attention(*arguments)
    torch.testing.assert_close(found, attention(*arguments), atol=4e-3, rtol=2**-6)


def wide(op: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """Arguments of the sizes of an 8B model."""
    generator = torch.Generator().manual_seed(12)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    made: dict[str, Callable[[], tuple[Any, ...]]] = {
        "rms_norm": lambda: (random(1000, 4096), random(4096).float(), 1e-5),
        "add_rms_norm": lambda: (random(300, 8192), random(300, 8192), random(8192).float(), 1e-5),
        "gated_activation": lambda: (random(500, 28672), "silu"),
        "embedding": lambda: (torch.randint(0, 30000, (700,)), random(30000, 4096), 1.0),
    }
    return made[op]()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "gated_activation", "embedding"])
def test_wide_rows_agree(op: str, dtype: torch.dtype) -> None:
    name = {"add_rms_norm": "rms_norm/triton-add-16", "embedding": "embedding/triton"}.get(
        op, f"{op}/triton-16"
    )
    pair = next(pair for pair in PAIRS if pair.name == name)
    arguments = on_gpu(wide(op, dtype))
    expected = pair.reference(*copy.deepcopy(arguments))
    torch.testing.assert_close(pair.kernel(*arguments), expected, atol=pair.atol, rtol=pair.rtol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_tokens_are_turned_and_cached(dtype: torch.dtype) -> None:
    pair = next(pair for pair in PAIRS if pair.name == "rope_and_cache/triton-16")
    shape = cases.AttentionShape(((1, 2000), (1500, 1500), (300, 4100)), (32, 8), 128, kv_dtype=dtype)
    batch = cases.attention_batch(shape)
    angles = torch.randn(batch.max_context_len, 64)
    qkv = torch.randn(len(batch.positions), 48 * 128).to(dtype)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    norm = (torch.rand(128), torch.rand(128), 1e-6)
    arguments = on_gpu((qkv, cases.attention_spec(shape), batch, cos_sin, cases.empty_cache(shape), norm))
    theirs, ours = copy.deepcopy(arguments), copy.deepcopy(arguments)
    close = partial(torch.testing.assert_close, atol=pair.atol, rtol=pair.rtol, equal_nan=True)
    close(pair.kernel(*ours), pair.reference(*theirs))
    for changed, wanted in zip(ours[4], theirs[4], strict=True):
        close(changed, wanted)
