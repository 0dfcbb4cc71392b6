"""An engine's runner on a CUDA device: kernels and graphs first, then a KV pool from what memory is left."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch

from footplate.engine.config import EngineConfig
from footplate.engine.kernels.compile_ahead import compiling_ahead, is_available
from footplate.engine.layers.attention import KvPair
from footplate.engine.models.decoder import Decoder
from footplate.engine.models.device_decoder import DeviceDecoder
from footplate.engine.plan import NewRow, ScheduledRow, SchedulerOutput
from footplate.engine.runner.batch import PersistentBatch
from footplate.engine.runner.decode_graphs import DecodeGraphs, graph_sizes
from footplate.engine.runner.device_runner import DeviceRunner
from footplate.engine.runner.device_state import DeviceState
from footplate.engine.runner.prefix_groups import MIN_SHARED_TOKENS
from footplate.engine.runner.step_kernels import TritonStep, torch_step
from footplate.engine.sampling.sampler import Sampler
from footplate.engine.types import SamplingParams

logger = logging.getLogger(__name__)
MIB = 1 << 20
# Lengths that make different kernels: one query, each number of rows that small products are padded to, a
# whole tile, an even and an odd number of tokens.
WARM_UP_LENGTHS = (1, 2, 9, 17, 32, 33, 64, 100, 256)
# One batch size for each way through the kernels of a decode step, and the largest.
COMPILED_SIZES = (1, 2, 8, 16, 32, 64, 128)
# Its outputs are indices: what follows must not find anything else in them, even where nothing is computed.
ALWAYS_LAUNCHED = ("_decode_inputs_kernel",)
FREE_MARGIN = 128 * MIB  # of what is free: other processes on the device breathe, too
# Later graphs add little to the first and largest, whose memory they share; this much each was seen at most.
SMALL_GRAPH_BYTES = 8 * MIB


@dataclass(frozen=True, slots=True)
class DeviceNeeds:
    """Memory in bytes that serving takes beside weights and KV blocks."""

    activations: int
    graphs: int


class DeviceFactory:
    """Makes runners on one loaded decoder; every runner has caches and graphs of its own."""

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        device: torch.device,
        kv_dtype: torch.dtype,
        max_len: int,
        used_before: int = 0,
    ) -> None:
        """`used_before`: bytes of the device that were in use before the weights came, by whoever."""
        self._decoder = decoder
        self._used_before = used_before
        self._config = config
        self._device = device
        self._kv_dtype = kv_dtype
        self._max_len = max_len
        self._is_compiled = False
        shape = decoder.config
        self.block_bytes = (
            2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * kv_dtype.itemsize * config.block_size
        )

    def make(self, num_blocks: int, max_len: int) -> tuple[DeviceRunner, DecodeGraphs]:
        """A runner with a pool of so many blocks; its graphs are not captured yet."""
        config, shape, device = self._config, self._decoder.config, self._device
        size = (num_blocks, shape.num_kv_heads, config.block_size, shape.head_dim)
        caches: list[KvPair] = [
            (
                torch.empty(size, dtype=self._kv_dtype, device=device),
                torch.empty(size, dtype=self._kv_dtype, device=device),
            )
            for _ in range(shape.num_layers)
        ]
        num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        step = TritonStep(caches) if device.type == "cuda" else torch_step()
        model = DeviceDecoder(self._decoder, caches, step)
        state = DeviceState(num_rows, max_len, config.block_size, device)
        graphs = DecodeGraphs(model, state, graph_sizes(num_rows))
        batch = PersistentBatch(num_rows, max_len, config.block_size, device)
        sampler = Sampler(shape.vocab_size, shape.eos_token_ids, device)
        return DeviceRunner(model, batch, state, sampler, graphs), graphs

    def make_ready(self, num_blocks: int, max_len: int) -> DeviceRunner:
        """A runner with every kernel compiled that serving can hit and all graphs recorded."""
        start = time.perf_counter()
        runner, graphs = self.make(num_blocks, max_len)
        self._compile(runner, graphs, num_blocks, max_len)
        self._warm_up(runner, num_blocks, max_len)
        graphs.capture()
        logger.info("kernels and graphs were ready after %.1f s", time.perf_counter() - start)
        return runner

    def _warm_up(self, runner: DeviceRunner, num_blocks: int, max_len: int) -> None:
        pool_len = min(max_len, num_blocks * self._config.block_size)
        lengths = [n for n in WARM_UP_LENGTHS if n <= pool_len]
        warm_up(runner, lengths, self._config.block_size, num_blocks if max_len > 512 else 0)

    def _compile(self, runner: DeviceRunner, graphs: DecodeGraphs, num_blocks: int, max_len: int) -> None:
        """Compile in threads what the warm-up and the graphs would compile one by one."""
        if self._is_compiled or self._device.type != "cuda" or not is_available():
            return
        self._is_compiled = True
        start = time.perf_counter()
        with compiling_ahead(ALWAYS_LAUNCHED):
            self._warm_up(runner, num_blocks, max_len)
            graphs.run_once(COMPILED_SIZES)
        logger.info("kernels were compiled after %.1f s", time.perf_counter() - start)

    def measure(self) -> DeviceNeeds:
        """Run the largest prompt step and record the largest graph on a small pool; see what they take."""
        budget = min(self._config.max_num_batched_tokens, self._max_len)
        num_blocks = -(-budget // self._config.block_size) + 1
        runner, graphs = self.make(num_blocks, self._max_len)
        self._compile(runner, graphs, num_blocks, self._max_len)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        warm_up(runner, [budget], self._config.block_size)
        activations = torch.cuda.max_memory_allocated(self._device) - before
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(self._device)[0]
        sizes = graph_sizes(min(self._config.max_num_seqs, self._config.max_num_batched_tokens))
        graphs.capture(sizes[-1:])
        torch.cuda.empty_cache()
        taken = max(0, free - torch.cuda.mem_get_info(self._device)[0])
        graphs.release()
        del runner, graphs
        torch.cuda.empty_cache()
        return DeviceNeeds(activations, taken + SMALL_GRAPH_BYTES * (len(sizes) - 1))

    def pool_bytes(self, needs: DeviceNeeds) -> int:
        """Memory for KV blocks: this engine's share of the device, less what it holds already and needs.

        Other engines on the device have shares of their own; no share gives more than is free.
        """
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        held = total - free - self._used_before
        share = int(total * self._config.gpu_memory_utilization) - held
        return max(0, min(share, free - FREE_MARGIN) - needs.activations - needs.graphs)


def used_bytes(device: torch.device) -> int:
    """Memory of a CUDA device that is in use, by any process."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def warm_up(runner: DeviceRunner, lengths: list[int], block_size: int, num_blocks: int = 0) -> None:
    """Run prompts of these lengths, then decodes with a shared prefix beside a prompt, in blocks from 0 on.

    Must run before the runner's first real step: nothing it writes is kept. The last part is left out when
    `num_blocks` are too few for it.
    """
    for step, length in enumerate(lengths):
        table = tuple(range(-(-length // block_size)))
        new = NewRow(0, (0,) * length, length, SamplingParams(temperature=0.0), table)
        row = ScheduledRow(0, 0, 0, length, samples=True)
        runner.run(SchedulerOutput(-1 - step, (row,), (new,), copies=((0, 0),)))
    shared = MIN_SHARED_TOKENS + block_size
    table = tuple(range(shared // block_size + 1))
    for count in (1, 2, 6):
        if len(table) + 1 > num_blocks or count + 1 > runner.max_rows:
            return
        greedy = SamplingParams(temperature=0.0)
        news = [NewRow(r, (0,) * (shared + 1), shared + 1, greedy, table) for r in range(count)]
        rows = [ScheduledRow(r, r, shared, 1, samples=True) for r in range(count)]
        news.append(NewRow(count, (0,) * 5, 5, greedy, (len(table),)))
        rows.append(ScheduledRow(count, count, 0, 5, samples=True))
        runner.run(SchedulerOutput(-100 - count, tuple(rows), tuple(news)))
