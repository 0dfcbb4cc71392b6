"""Timing on a CUDA device: calls over distinct memory in one CUDA graph, and the ceiling they are held to."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from footplate.engine.bench.read_kernel import make_reader

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of one call: the 20th, 50th and 80th percentile over rounds."""

    p20: float
    p50: float
    p80: float


def _percentiles(values: Sequence[float]) -> Times:
    if len(values) < 2:
        return Times(values[0], values[0], values[0])
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return Times(round(tenths[1], 3), round(tenths[4], 3), round(tenths[7], 3))


def time_calls(calls: Sequence[Call], device: torch.device, rounds: int = 15) -> Times:
    """Time of one call, taken over all of them in turn: on CUDA as one graph, elsewhere by the clock.

    The caller sees to it that together they touch several times what the L2 cache holds.
    """
    if device.type != "cuda":
        return _by_clock(calls, rounds)
    graph = captured(calls)
    graph.replay()
    taken = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return _percentiles(taken)


def captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """The calls as one graph; each was run once before, so that nothing is compiled while recording."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in (calls[0], calls[-1]):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _by_clock(calls: Sequence[Call], rounds: int) -> Times:
    taken = []
    for _ in range(min(rounds, 2)):
        begin = time.perf_counter()
        for call in calls:
            call()
        taken.append((time.perf_counter() - begin) * 1e6 / len(calls))
    return _percentiles(taken)


def read_ceiling(pool: torch.Tensor, rounds: int = 10) -> float:
    """GB/s at which the device reads memory and does next to nothing with it; the better of two cuts."""
    device = pool.device
    block, programs = (4096, (132 * 8, 132 * 16)) if device.type == "cuda" else (256, (2,))
    readers = [make_reader(pool, num_programs, block) for num_programs in programs]
    return max(num_bytes / time_calls([read], device, rounds).p50 / 1e3 for read, num_bytes in readers)
