"""One model's engine under the fixed loads, each figure beside what the machine could do at best."""

from __future__ import annotations

import gc
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from footplate.engine.bench.ceilings import Ceilings, measure_ceilings
from footplate.engine.bench.loads import build
from footplate.engine.bench.record import spread
from footplate.engine.bench.roofline import StepCost, StepCounter, StoredSizes
from footplate.engine.bench.suite import Row
from footplate.engine.config import EngineConfig
from footplate.engine.core import EngineCore, Pending, QueueRunner, Runner
from footplate.engine.errors import EngineError
from footplate.engine.kernels.linear.dense import DenseEmbedding, DenseLinear
from footplate.engine.kernels.linear.packed import PackedEmbedding, PackedLinear
from footplate.engine.loader import LoadedModel, load_model, make_engine
from footplate.engine.models.decoder import Decoder
from footplate.engine.plan import SchedulerOutput, StepResult
from footplate.engine.types import EngineRequest, SamplingParams

logger = logging.getLogger(__name__)

# What differs from a server's defaults: whole batches are given at once, and all are served in their order.
OPTIONS: dict[str, dict[str, Any]] = {
    "cuda": {"max_num_seqs": 1024, "max_num_batched_tokens": 16384, "max_waiting": 1 << 30, "policy": "fcfs"},
    "cpu": {"max_num_seqs": 64, "kv_cache_gib": 1.0, "max_waiting": 1 << 30, "policy": "fcfs"},
}


class _RecordingRunner:
    """Passes steps on, and keeps them while asked to."""

    def __init__(self, runner: Runner) -> None:
        self.inner: Any = runner
        self.steps: list[SchedulerOutput] | None = None

    def run(self, output: SchedulerOutput) -> StepResult:
        self._keep(output)
        result: StepResult = self.inner.run(output)
        return result

    def _keep(self, output: SchedulerOutput) -> None:
        if self.steps is not None:
            self.steps.append(output)


class _RecordingQueueRunner(_RecordingRunner):
    def launch(self, output: SchedulerOutput) -> Pending:
        self._keep(output)
        pending: Pending = self.inner.launch(output)
        return pending


@dataclass(frozen=True, slots=True)
class Run:
    """One load, run to its end."""

    wall_s: float
    out_tokens: int
    steps: int
    waited_s: float | None  # for the device; None where the runner does not tell


class EngineBench:
    """An engine that is asked for nothing else."""

    def __init__(self, source: str, options: dict[str, Any]) -> None:
        """Load the model; `options` are those of EngineConfig and go before OPTIONS.

        Raises:
            LoadError: the model or an option can't be used.
        """
        device = options.get("device", "auto")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.config = EngineConfig.from_options(OPTIONS[torch.device(device).type] | options)
        start = time.perf_counter()
        model = load_model(source, self.config)
        loaded = make_engine(model, self.config)
        self.start_s = time.perf_counter() - start
        self.load_time = loaded.load_time
        self.device = model.place.device
        self.dtype, self.max_model_len, self.shape = loaded.dtype, loaded.max_model_len, loaded.model_config
        self._sizes = _stored_sizes(model, self.config)
        kept = _RecordingQueueRunner if isinstance(loaded.core.runner, QueueRunner) else _RecordingRunner
        self._runner = kept(loaded.core.runner)
        self._core = EngineCore(loaded.core.scheduler, self._runner, ahead=self.config.async_scheduling)
        self._numbers = itertools.count()
        self._seeds = itertools.count(1000, 10)

    @property
    def kv_tokens(self) -> int:
        return self._core.scheduler.kv_tokens

    def ceilings(self) -> Ceilings:
        """The device's, for memory of the size that a step's weights have."""
        return measure_ceilings(self.device, self._sizes.layer_matrices + self._sizes.head)

    def measure(self, row: Row, rounds: int, ceilings: Ceilings) -> dict[str, Any]:
        """A row of the table. The first run warms up and is counted; its time is not used.

        Raises:
            EngineError: the engine refuses the load.
        """
        if row.needs_warmth:
            self.run(row.load)
        costs = self.costs(row)
        values, walls, whole = [], [], []
        for _ in range(rounds):
            run = self.run(row.load)
            less_s = self.run(row.less).wall_s if row.less is not None else 0.0
            walls.append(run.wall_s - less_s)
            values.append(row.value(walls[-1], run.out_tokens))
            whole.append(run)
        found = spread(values)
        made = {"workload": row.workload, "value": found["median"], "unit": row.unit, "spread": found}
        made["rounds"] = rounds
        if (host := _host_ms(whole)) is not None:
            made["host_ms_a_step"] = host
        return made | {"roofline": _roofline(costs, row, spread(walls)["median"], ceilings)}

    def close(self) -> None:
        self._core.shutdown()

    def run(self, load: dict[str, Any], seed: int | None = None) -> Run:
        """Run a load of `loads.build` to its end; without a seed its prompts are new ones."""
        prompts, lengths = build(load, next(self._seeds) if seed is None else seed)
        gc.collect()
        gc.freeze()
        inner = self._runner.inner
        waited, steps = getattr(inner, "waited_s", None), self._core.stats().steps
        start = time.perf_counter()
        for prompt, length in zip(prompts, lengths, strict=True):
            params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
            self._core.add(EngineRequest(f"bench-{next(self._numbers)}", prompt, params))
        count = 0
        while self._core.has_work:
            count += sum(len(delta.token_ids) for delta in self._core.step())
        wall = time.perf_counter() - start
        gc.unfreeze()
        assert count == sum(lengths), f"{count} tokens came of {sum(lengths)}"
        waited = inner.waited_s - waited if waited is not None else None
        return Run(wall, count, self._core.stats().steps - steps, waited)

    def costs(self, row: Row) -> list[tuple[StepCost, int]]:
        """What each step of the row costs, with the sign it enters the figure with."""
        made = [(cost, 1) for cost in self.count(row.load)]
        if row.less is not None:
            made += [(cost, -1) for cost in self.count(row.less)]
        return made

    def count(self, load: dict[str, Any]) -> Iterator[StepCost]:
        """Run a load, and tell what each of its steps must move and compute."""
        kept: list[SchedulerOutput] = []
        self._runner.steps = kept
        try:
            self.run(load)
        finally:
            self._runner.steps = None
        return map(StepCounter(self.shape, self._sizes).count, kept)


def run_rows(
    bench: EngineBench,
    table: Iterator[Row],
    rounds: int,
    ceilings: Ceilings,
    tell: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Measure each row and tell it as it comes; one that can't run says why in `skipped`."""
    made = []
    for row in table:
        if row.longest > bench.max_model_len:
            reason = f"{row.longest} tokens a sequence; this engine holds {bench.max_model_len}"
            found = _skipped(row, reason)
        else:
            try:
                found = bench.measure(row, rounds, ceilings)
            except EngineError as error:
                found = _skipped(row, str(error))
        tell(found)
        made.append(found)
    return made


def _skipped(row: Row, reason: str) -> dict[str, Any]:
    return {"workload": row.workload, "value": None, "unit": row.unit, "skipped": reason}


def _host_ms(runs: Sequence[Run]) -> float | None:
    """The host's own work a step: what is left of the time when the waits for the device are taken off."""
    own = [(r.wall_s - r.waited_s) / max(r.steps, 1) for r in runs if r.waited_s is not None]
    return round(1000 * spread(own)["median"], 4) if own else None


def _roofline(
    costs: Sequence[tuple[StepCost, int]], row: Row, wall_s: float, ceilings: Ceilings
) -> dict[str, Any]:
    """Bytes, operations and the least time, all for what one figure of the row stands for."""
    least_s = sum(sign * cost.least_s(ceilings.bytes_s, ceilings.flops_s) for cost, sign in costs)
    return {
        "bytes": sum(sign * cost.num_bytes for cost, sign in costs) // row.steps,
        "flops": sum(sign * cost.num_flops for cost, sign in costs) // row.steps,
        "ceiling_bytes_s": round(ceilings.bytes_s),
        "ceiling_flops_s": round(ceilings.flops_s),
        "floor_ms": round(1000 * least_s / row.steps, 4),
        # A difference of two times can be lost in their noise.
        "share": round(least_s / wall_s, 4) if wall_s > 0 else None,
    }


def _stored_sizes(model: LoadedModel, config: EngineConfig) -> StoredSizes:
    decoder = model.decoder
    return StoredSizes(
        layer_matrices=sum(_num_bytes(m) for m in _layer_matrices(decoder)),
        head=_num_bytes(decoder.head),
        embedding_row=_num_bytes(decoder.embedding) // model.model_config.vocab_size,
        kv_element=model.kv_dtype.itemsize,
        block_size=config.block_size,
    )


def _layer_matrices(decoder: Decoder) -> Iterator[Any]:
    for layer in decoder.layers:
        yield from (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)


def _num_bytes(weight: Any) -> int:
    if isinstance(weight, PackedLinear | PackedEmbedding):
        return weight.matrix.num_bytes
    assert isinstance(weight, DenseLinear | DenseEmbedding)
    return weight.weight.nbytes
