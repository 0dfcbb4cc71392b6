"""Time the Triton kernels of a step on a CUDA device against memory's read rate and torch's best, in one run.

    python engine/benchmarks/bench_gpu_kernels.py [--seconds 240] [--sweep] [--only streamed,attention]
    python engine/benchmarks/bench_gpu_kernels.py --device cpu    # tiny shapes in Triton's interpreter

Every case runs over weights or caches that together are far larger than the L2 cache, in one CUDA graph.
Results are saved after each case, so that a run cut short still leaves what it found. `streamed` are the
products of a step of 1 to 64 rows on Hopper, `products` those of one row of a small model and elsewhere.
`cuBLAS` is the bare product, without the norm, activation, rotation or residual that our kernel also does. A
sweep tries tilings in the time that is left and prints the best ones as entries of `skinny_linear/tiling.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if "cpu" in sys.argv:  # Triton must be told before it is imported
    os.environ["TRITON_INTERPRET"] = "1"

import gpu_sweep
import torch
from gpu_steps import (
    ATTENTIONS,
    MODELS,
    TINY,
    Model,
    attention_calls,
    block_calls,
    chain_calls,
    draw_calls,
    product_call,
)
from gpu_timing import Times, read_ceiling, time_calls

from footplate.engine.kernels.skinny_linear.tiling import Tiling, choose, row_bucket
from footplate.engine.kernels.streamed_block.launch import MAX_ROWS as BLOCK_ROWS
from footplate.engine.kernels.streamed_linear.kernel import streamed_linear

PRODUCTS = ("norm_qkv_rope_cache", "linear_add_o", "norm_gate_up", "linear_add_down", "norm_linear_head")
MATRICES = dict(zip(PRODUCTS, ("qkv", "out", "gate_up", "down", "head"), strict=True))
ROW_COUNTS = (1, 8, 16, 32, 64)
L2_MULTIPLE_BYTES = 400 << 20  # what the calls of one case read at least, several times any L2
PARTS = ("streamed", "products", "chain", "attention", "draws")


@dataclass
class Bench:
    """One run: its device, its memory, its deadline and what it has found so far."""

    device: torch.device
    pool: torch.Tensor  # random 16-bit values that weights are cut from
    deadline: float
    path: Path
    found: dict[str, Any]

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.found, indent=1) + "\n")

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def case(self, part: str, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Run one case, whatever happens to it, and save. None: it failed, or there was no time."""
        if self.left() < 0:
            self.found.setdefault("skipped", []).append(f"{part} {name}")
            return None
        try:
            row: dict[str, Any] | None = {"case": name} | measure()
        except Exception as error:
            traceback.print_exc(limit=4)
            self.found.setdefault("failed", []).append(f"{part} {name}: {error!r}"[:500])
            row = None
        if row is not None:
            self.found.setdefault(part, []).append(row)
            print(line(row), flush=True)
        self.save()
        return row

    def weights(self, num_outputs: int, num_inputs: int) -> list[torch.Tensor]:
        """At least eight weights that lie apart, as many as the L2 cache needs to forget the first."""
        size = num_outputs * num_inputs
        count = 2 if self.device.type == "cpu" else max(8, -(-L2_MULTIPLE_BYTES // (2 * size)))
        count = max(1, min(count, self.pool.numel() // size))
        return [self.pool[i * size :][:size].view(num_outputs, num_inputs) for i in range(count)]


def line(row: dict[str, Any]) -> str:
    """One row of the table: times in microseconds."""
    parts = [f"{row['case']:<44}"]
    for key, value in row.items():
        if isinstance(value, float):
            parts.append(f"{key} {value:.3g}" if value < 10 else f"{key} {value:.1f}")
        elif isinstance(value, dict) and "p50" in value:
            parts.append(f"{key} {value['p50']:.2f}")
    return "  ".join(parts)


def rates(num_bytes: float, times: Times, ceiling: float) -> dict[str, float]:
    rate = num_bytes / times.p50 / 1e3
    return {"GB/s": rate, "share": rate / ceiling if ceiling else 0.0}


# --- products -------------------------------------------------------------------------------------------


def product_row(bench: Bench, model: Model, op: str, num_rows: int, tiling: Tiling | None) -> dict[str, Any]:
    """Our fused product with and without programmatic launch, beside torch's bare one."""
    num_outputs, num_inputs = model.matrix(op)
    weights = bench.weights(num_outputs, num_inputs)
    on_gpu = bench.device.type == "cuda"
    bucket = row_bucket(num_rows)
    row: dict[str, Any] = {
        "N": num_outputs,
        "K": num_inputs,
        "M": num_rows,
        "tiling": asdict(tiling or choose(_kernel_name(op), num_outputs, num_inputs, bucket)),
    }
    plain = [product_call(model, op, w, num_rows, tiling, use_pdl=False) for w in weights]
    row["plain"] = asdict(time_calls(plain, bench.device))
    best = Times(**row["plain"])
    if on_gpu:
        early = [product_call(model, op, w, num_rows, tiling, use_pdl=True) for w in weights]
        times = time_calls(early, bench.device)
        row["pdl"] = asdict(times)
        best = min(best, times, key=lambda t: t.p50)
    x = torch.randn(num_rows, num_inputs, device=bench.device).to(weights[0].dtype)
    output = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=bench.device)
    bare = [lambda w=w: torch.mm(x, w.T, out=output) for w in weights]
    row["cuBLAS"] = asdict(time_calls(bare, bench.device))
    row |= rates(num_outputs * num_inputs * 2, best, bench.found["ceiling"])
    row["speed-up"] = row["cuBLAS"]["p50"] / best.p50
    return row


def streamed(bench: Bench, models: tuple[Model, ...], row_counts: tuple[int, ...]) -> None:
    """Products in equal runs of tiles, and a block of four of them with all that stands between."""
    for model in models:
        for num_rows in row_counts:
            for op in PRODUCTS[:4]:
                bench.case(
                    "streamed",
                    f"{model.name} streamed {MATRICES[op]} M={num_rows}",
                    lambda m=model, o=op, r=num_rows: streamed_row(bench, m, o, r),
                )
            if bench.device.type == "cuda" and num_rows <= BLOCK_ROWS:
                name = f"{model.name} streamed block M={num_rows}"
                bench.case("streamed", name, lambda m=model, r=num_rows: block_row(bench, m, r))


def streamed_row(bench: Bench, model: Model, op: str, num_rows: int) -> dict[str, Any]:
    """One product, which leaves parts for the next kernel to add, beside torch's."""
    shape = model.matrix(op)
    weights = bench.weights(*shape)
    x = torch.empty(num_rows, shape[1], dtype=weights[0].dtype, device=bench.device).normal_()
    use_pdl = bench.device.type == "cuda"
    ours = time_calls([lambda w=w: streamed_linear(x, w, use_pdl=use_pdl) for w in weights], bench.device)
    output = torch.empty(num_rows, shape[0], dtype=x.dtype, device=bench.device)
    bare = time_calls([lambda w=w: torch.mm(x, w.T, out=output) for w in weights], bench.device)
    row = {"N": shape[0], "K": shape[1], "M": num_rows, "ours": asdict(ours), "cuBLAS": asdict(bare)}
    row |= rates(shape[0] * shape[1] * 2, ours, bench.found["ceiling"])
    return row | {"speed-up": bare.p50 / ours.p50}


def block_row(bench: Bench, model: Model, num_rows: int) -> dict[str, Any]:
    """All layers' blocks in turn, one of them timed, beside the four bare products by cuBLAS."""
    ours, bare, num_bytes = block_calls(model, bench.pool, PRODUCTS[:4], num_rows)
    times = time_calls(ours, bench.device, 8)
    theirs = time_calls(bare, bench.device, 8)
    row = {"M": num_rows, "ours": asdict(times), "cuBLAS": asdict(theirs)}
    row |= rates(num_bytes, times, bench.found["ceiling"])
    return row | {"speed-up": theirs.p50 / times.p50}


def _kernel_name(op: str) -> str:
    return op.removesuffix("_o").removesuffix("_down").removesuffix("_head")


def products(bench: Bench, models: tuple[Model, ...], row_counts: tuple[int, ...]) -> None:
    for model in models:
        for num_rows in row_counts:
            for op in PRODUCTS:
                name = f"{model.name} {op} M={num_rows}"
                bench.case(
                    "products", name, lambda m=model, o=op, r=num_rows: product_row(bench, m, o, r, None)
                )
            bench.case(
                "steps",
                f"{model.name} all products M={num_rows}",
                lambda m=model, r=num_rows: step_row(bench, m, r),
            )


def step_row(bench: Bench, model: Model, num_rows: int) -> dict[str, Any]:
    """Milliseconds that a step's products take by the rows found for them: all layers and the head."""
    rows = {row["case"]: row for row in bench.found.get("products", [])}
    total = {"ours ms": 0.0, "cuBLAS ms": 0.0}
    for op in PRODUCTS:
        row = rows[f"{model.name} {op} M={num_rows}"]
        count = 1 if op.endswith("head") else model.layers
        ours = min(row[kind]["p50"] for kind in ("plain", "pdl") if kind in row)
        total["ours ms"] += ours * count / 1e3
        total["cuBLAS ms"] += row["cuBLAS"]["p50"] * count / 1e3
    return total


# --- a whole step's layers ------------------------------------------------------------------------------


def chain_row(
    bench: Bench, model: Model, num_rows: int, use_pdl: bool, with_attention: bool
) -> dict[str, Any]:
    """All layers' kernels in their order, once; and the same with cuBLAS products alone."""
    matrices = PRODUCTS[:4]
    ours, bare, num_bytes = chain_calls(
        model, bench.pool, matrices, num_rows, use_pdl=use_pdl, with_attention=with_attention
    )
    times = time_calls([lambda: [call() for call in ours]], bench.device, 8)
    theirs = time_calls([lambda: [call() for call in bare]], bench.device, 8)
    row = {"M": num_rows, "ours": asdict(times), "cuBLAS only": asdict(theirs)}
    return row | rates(num_bytes, times, bench.found["ceiling"])


def chains(bench: Bench, models: tuple[Model, ...], row_counts: tuple[int, ...]) -> None:
    for model in models:
        for num_rows in row_counts:
            for use_pdl, with_attention in ((True, True), (True, False), (False, True)):
                if use_pdl and bench.device.type == "cpu":
                    continue
                name = f"{model.name} layers M={num_rows} pdl={use_pdl} attention={with_attention}"
                bench.case(
                    "chain",
                    name,
                    lambda m=model, r=num_rows, p=use_pdl, a=with_attention: chain_row(bench, m, r, p, a),
                )


# --- attention and draws --------------------------------------------------------------------------------


def attention_row(
    bench: Bench, model: Model, num_rows: int, context: int, is_prefill: bool
) -> dict[str, Any]:
    cases = attention_calls(model, bench.device, num_rows, context, is_prefill)
    row: dict[str, Any] = {"sequences": num_rows, "context": context}
    for name, calls in cases:
        try:
            row[name] = asdict(time_calls(calls, bench.device, 8))
        except Exception as error:
            row[f"{name} failed"] = repr(error)[:200]
    if "ours" not in row:
        return row
    ours = Times(**row["ours"])
    if is_prefill:
        work = 2 * num_rows * model.heads * model.head_dim * context * context
        row["TFLOP/s"] = work / ours.p50 / 1e6
        return row
    num_bytes = 4 * num_rows * context * model.kv_heads * model.head_dim
    return row | rates(num_bytes, ours, bench.found["ceiling"])


def attentions(bench: Bench, models: tuple[Model, ...]) -> None:
    for model in models:
        for num_rows, context, is_prefill in ATTENTIONS[bench.device.type]:
            kind = "prefill" if is_prefill else "decode"
            name = f"{model.name} {kind} {num_rows}@{context}"
            bench.case(
                "attention",
                name,
                lambda m=model, n=num_rows, c=context, p=is_prefill: attention_row(bench, m, n, c, p),
            )


def draws(bench: Bench, models: tuple[Model, ...]) -> None:
    model = models[0]
    for num_rows in (1, 64, 256) if bench.device.type == "cuda" else (2,):
        for kind in ("greedy", "plain", "truncated"):

            def measure(num_rows: int = num_rows, kind: str = kind) -> dict[str, Any]:
                ours, theirs = draw_calls(bench.device, model.vocab, num_rows, kind)
                times = {"ours": time_calls([ours] * 4, bench.device)}
                times["torch argmax"] = time_calls([theirs] * 4, bench.device)
                return {name: asdict(value) for name, value in times.items()}

            bench.case("draws", f"{kind} {num_rows}x{model.vocab}", measure)


# --- sweep ----------------------------------------------------------------------------------------------


def compile_product(
    model: Model, op: str, num_rows: int, tiling: Tiling | None, use_pdl: bool = True
) -> None:
    """Runs in a process that compiles and launches nothing; host memory that is never touched will do."""
    weight = torch.empty(model.matrix(op), dtype=torch.bfloat16)
    product_call(model, op, weight, num_rows, tiling, use_pdl=use_pdl)()


def compile_defaults(bench: Bench, models: tuple[Model, ...], row_counts: tuple[int, ...]) -> None:
    """Fill Triton's cache with what the parts before a sweep launch; one process alone would need minutes."""
    jobs = [
        (model, op, num_rows, None, use_pdl)
        for model in models
        for num_rows in row_counts
        for op in PRODUCTS
        for use_pdl in (True, False)
    ]
    compilers = gpu_sweep.Compilers()
    begin = time.monotonic()
    done = wait(compilers.submit(compile_product, jobs), timeout=bench.left() / 3).done
    failed = [repr(error)[:300] for error in (future.exception() for future in done) if error]
    bench.found["compiled"] = {"of": len(jobs), "done": len(done), "failed": failed[:5]}
    bench.found["compiled"]["seconds"] = round(time.monotonic() - begin, 1)
    print(bench.found["compiled"], flush=True)
    compilers.stop()


def sweep_orders(models: tuple[Model, ...], row_counts: tuple[int, ...]) -> Iterator[tuple[Model, str, int]]:
    """What to sweep, the most telling first: small batches, the larger model, layers before the head."""
    ops = sorted(PRODUCTS, key=lambda op: op.endswith("head"))
    for num_rows in sorted(row_counts, key=lambda r: {1: 0, 32: 1, 8: 2, 64: 3, 16: 4}.get(r, 5)):
        for model in models:
            yield from ((model, op, num_rows) for op in ops)


def sweep_case(
    bench: Bench, model: Model, op: str, num_rows: int, candidates: list[Tiling]
) -> dict[str, Any]:
    """The best of some tilings of one shape; the first of them is what there was before."""
    num_outputs, num_inputs = model.matrix(op)
    weights = bench.weights(num_outputs, num_inputs)
    tried: list[tuple[float, Tiling]] = []
    for tiling in candidates:
        try:
            calls = [product_call(model, op, w, num_rows, tiling, use_pdl=True) for w in weights]
            tried.append((time_calls(calls, bench.device, 5).p50, tiling))
        except Exception as error:
            print(f"  {tiling}: {error!r}"[:160], flush=True)
    before = tried[0][0]
    tried.sort(key=lambda t: t[0])
    took, best = tried[0]
    values = ", ".join(map(str, asdict(best).values()))
    shape = f'"{_kernel_name(op)}", {num_outputs}, {num_inputs}, {row_bucket(num_rows)}'
    row: dict[str, Any] = {"best": took, "before": before, "entry": f"({shape}): Tiling({values}),"}
    row |= rates(num_outputs * num_inputs * 2, Times(took, took, took), bench.found["ceiling"])
    row["tried"] = [(round(t, 3), *asdict(tiling).values()) for t, tiling in tried]
    return row


def sweep(bench: Bench, models: tuple[Model, ...], row_counts: tuple[int, ...]) -> None:
    """Tiles of every shape first; then, from the best of each, how much to ask for early."""
    orders = list(sweep_orders(models, row_counts))
    candidates = []
    for model, op, num_rows in orders:
        shape, bucket = model.matrix(op), row_bucket(num_rows)
        rule = choose(_kernel_name(op), *shape, bucket)
        candidates.append([rule, *(t for t in gpu_sweep.tilings(shape[0], bucket) if t != rule)])
    found = _sweep(bench, "sweep", orders, candidates)
    kept = [(order, row) for order, row in zip(orders, found, strict=True) if row is not None]
    best = [Tiling(*row["tried"][0][1:]) for _, row in kept]
    _sweep(
        bench, "sweep prefetch", [order for order, _ in kept], [[t, *gpu_sweep.prefetches(t)] for t in best]
    )
    entries = {
        row["case"]: row["entry"] for part in ("sweep", "sweep prefetch") for row in bench.found.get(part, [])
    }
    print("\n".join(f"    {entry}" for entry in entries.values()))


def _sweep(
    bench: Bench, part: str, orders: list[tuple[Model, str, int]], candidates: list[list[Tiling]]
) -> list[dict[str, Any] | None]:
    """Measure one shape after another while other processes compile what comes next."""
    found = []
    compilers = gpu_sweep.Compilers()
    try:
        ahead = [
            compilers.submit(compile_product, [(*order, tiling) for tiling in tilings])
            for order, tilings in zip(orders, candidates, strict=True)
        ]
        for order, tilings, futures in zip(orders, candidates, ahead, strict=True):
            if bench.left() < 0:
                found.append(None)
                continue
            wait(futures, timeout=bench.left())
            name = f"{order[0].name} {order[1]} M={order[2]}"
            found.append(bench.case(part, name, lambda o=order, t=tilings: sweep_case(bench, *o, t)))
    finally:
        compilers.stop()
    return found


# --- the run --------------------------------------------------------------------------------------------


def facts(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"
    return {"device": name, "torch": torch.__version__, "unit": "microseconds, p20/p50/p80 of one call"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=240, help="start no case after this long")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--models", default="8b,1b")
    parser.add_argument("--rows", default=",".join(map(str, ROW_COUNTS)))
    parser.add_argument("--only", default=",".join(PARTS), help="also: none, to sweep alone")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_kernels.json")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    options = parse()
    device = torch.device(options.device)
    begin = time.monotonic()
    on_gpu = device.type == "cuda"
    pool_size = 1 << 33 if on_gpu else 1 << 17
    pool = torch.empty(pool_size, dtype=torch.bfloat16, device=device)
    for piece in pool.chunk(8):
        piece.normal_(std=0.02)
    bench = Bench(device, pool, begin + options.seconds, options.out, facts(device))
    bench.found["ceiling"] = 0.0
    bench.case("read", "read ceiling", lambda: {"GB/s": read_ceiling(pool[: 1 << 31])})
    bench.found["ceiling"] = bench.found.get("read", [{"GB/s": 0.0}])[0]["GB/s"]
    models = tuple(MODELS[name] for name in options.models.split(",")) if on_gpu else (TINY,)
    rows = tuple(map(int, options.rows.split(","))) if on_gpu else (1, 3)
    parts = options.only.split(",")
    if on_gpu and {"products", "chain"} & set(parts):
        try:
            compile_defaults(bench, models, rows[:1])
        except Exception:  # then this process compiles by itself
            traceback.print_exc()
    # From two rows on no step uses the fused products; a sweep looks at them all the same.
    fused_rows = rows[:1]
    for part, measure, counts in (
        ("streamed", streamed, rows),
        ("products", products, fused_rows),
        ("chain", chains, fused_rows),
    ):
        if part in parts:
            measure(bench, models, counts)
    for part, measure_all in (("attention", attentions), ("draws", draws)):
        if part in parts:
            measure_all(bench, models)
    if options.sweep and on_gpu:
        try:
            sweep(bench, models, rows)
        except Exception:
            traceback.print_exc()
    bench.found["seconds"] = round(time.monotonic() - begin, 1)
    bench.save()
    print(f"{bench.found['seconds']} s; failed: {bench.found.get('failed', [])}; {bench.path}")


if __name__ == "__main__":
    main()
