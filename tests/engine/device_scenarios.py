"""Faults that other engines had on the device side, as scenarios that run on any device.

tests/engine/test_device_faults.py runs them on a CPU, with the runner's own code and plain kernels;
tests/gpu/test_faults.py on a GPU, with graphs. Each takes a rig, which makes engines around one small model.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from footplate.engine.core import EngineCore
from footplate.engine.types import BATCH_PRIORITY, EngineRequest
from tests.engine.answers import greedy, run

BLOCK = 16
GIB = 2**30
OUTPUT = 10


@dataclass(frozen=True)
class Rig:
    """Makes engines whose pool starts full of NaN.

    In 16 bits an id may depend on the batch, so there only runs of the same steps are compared.
    """

    build: Callable[..., EngineCore]
    vocab_size: int
    block_bytes: int  # of the KV pool
    dtype: str = "float32"

    @property
    def is_exact(self) -> bool:
        return self.dtype == "float32"

    def make(self, num_blocks: int = 64, **options: Any) -> EngineCore:
        defaults = {"dtype": self.dtype, "max_num_seqs": 8, "prefix_caching": False}
        memory = (num_blocks + 0.5) * self.block_bytes / GIB
        core = self.build(**defaults | {"kv_cache_gib": memory} | options)
        assert core.stats().kv_blocks_total == num_blocks
        return core

    def prompt(self, number: int, length: int) -> list[int]:
        rng = random.Random(number)
        return [rng.randrange(5, self.vocab_size) for _ in range(length)]

    def solo(self, prompt: list[int], core: EngineCore | None = None, **params: Any) -> list[int]:
        """What a prompt gets with nobody beside it."""
        core = core or self.make()
        request = EngineRequest("solo", prompt, greedy(**{"max_tokens": OUTPUT} | params))
        return run(core, request)["solo", 0].token_ids


def runner(core: EngineCore) -> Any:
    return core.runner


# --- rows that only fill a graph ------------------------------------------------------------------------


def check_a_decode_step_changes_its_own_rows_only(rig: Rig, count: int, gone: int) -> None:
    """`count` rows decode, `gone` of them are aborted on the way: the rest runs in a larger, padded step.

    Tables grow by a token in the rows that run, the pool by a slot for each, and nothing else changes: not
    the rows of padding (-1 would be the last one), and not those whose owner has left.
    """
    core = rig.make(async_scheduling=False)
    for i in range(count):
        core.add(EngineRequest(f"r{i}", rig.prompt(i, 8), greedy(40)))
    while any(s.is_prefilling for s in core.scheduler.live_sequences()) or core.scheduler.num_waiting:
        core.step()
    for i in range(gone):
        core.abort(f"r{2 * i}")
    for _ in range(3):
        before, caches = _tables(core), _caches(core)
        core.step()
        sequences = core.scheduler.live_sequences()
        live = sorted(s.row for s in sequences)
        assert len(live) == count - gone
        tokens, lengths, blocks = _tables(core)
        grown = (lengths - before[1]).nonzero().flatten().tolist()
        assert grown == live and (lengths - before[1]).max() == 1
        places = {(row, int(before[1][row])) for row in live}
        assert {tuple(p) for p in (tokens != before[0]).nonzero().tolist()} <= places
        assert {row for row, _ in (blocks != before[2]).nonzero().tolist()} <= set(live)
        ends = [
            (s.block_table[(s.num_computed - 1) // BLOCK], (s.num_computed - 1) % BLOCK) for s in sequences
        ]
        for old, new in zip(caches, _caches(core), strict=True):
            changed = ((old != new) & ~(old.isnan() & new.isnan())).any(dim=-1).any(dim=1)
            assert sorted(map(tuple, changed.nonzero().tolist())) == sorted(ends)


def _tables(core: EngineCore) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    state = runner(core)._state
    return state.tokens.cpu().clone(), state.lengths.cpu().clone(), state.blocks.cpu().clone()


def _caches(core: EngineCore) -> list[torch.Tensor]:
    return [cache.cpu().clone() for pair in runner(core).caches for cache in pair]


# --- memory that nobody wrote ---------------------------------------------------------------------------


def check_slots_that_no_row_owns_never_matter(rig: Rig) -> None:
    """After every step all slots beyond the tokens of live rows become NaN, around the edges of blocks."""
    lengths = (1, 15, 16, 17, 31, 32, 33)
    requests = [EngineRequest(f"r{n}", rig.prompt(n, n), greedy(20)) for n in lengths]
    clean = rig.make(async_scheduling=False)
    for pair in runner(clean).caches:
        for cache in pair:
            cache.zero_()
    want = {key[0]: answer.token_ids for key, answer in run(clean, *requests).items()}
    core = rig.make(async_scheduling=False)
    for request in requests:
        core.add(request)
    got: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while core.has_work:
        for delta in core.step():
            got[delta.request_id] += delta.token_ids
        poison_free_slots(core)
    assert got == want


def poison_free_slots(core: EngineCore) -> None:
    first = runner(core).caches[0][0]
    owned = torch.zeros((first.shape[0], first.shape[2]), dtype=torch.bool)
    for s in core.scheduler.live_sequences():
        for position in range(s.num_computed):
            owned[s.block_table[position // BLOCK], position % BLOCK] = True
    free = ~owned.to(first.device)[:, None, :, None]
    for pair in runner(core).caches:
        for cache in pair:
            cache.masked_fill_(free, float("nan"))


# --- aborts while a step is on its way ------------------------------------------------------------------


def check_the_next_owner_is_left_alone(rig: Rig, steps: int, **options: Any) -> None:
    """A request is aborted when `steps` were launched and the last one was not read; another takes its place.

    The pool or the rows hold one of them only. The other's tokens, and its keys and values, are those that it
    has alone, and so is the host's copy of its tokens, which penalties and log-probabilities look at.
    """
    penalty = {"repetition_penalty": 1.5}
    gone, stays = rig.prompt(1, 40), rig.prompt(2, 40)
    options = {"num_blocks": 4, "max_num_batched_tokens": 16} | options
    alone = rig.make(**options)
    want = rig.solo(stays, alone, max_tokens=12, **penalty)
    want_kv = _kv(alone, 0, len(stays) + 11)
    core = rig.make(**options)
    core.add(EngineRequest("gone", gone, greedy(20)))
    for _ in range(steps):
        core.step()
    core.abort("gone")
    core.scheduler.check()
    core.add(EngineRequest("stays", stays, greedy(12, **penalty)))
    told: list[int] = []
    row = -1
    while core.has_work:
        for delta in core.step():
            told += delta.token_ids if delta.request_id == "stays" else ()
        row = next((s.row for s in core.scheduler.live_sequences() if s.request.request_id == "stays"), row)
        core.scheduler.check()
    assert told == want
    assert runner(core)._batch.context(row).token_ids.tolist() == stays + want
    for got, wanted in zip(_kv(core, row, len(stays) + 11), want_kv, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)


def _kv(core: EngineCore, row: int, num_tokens: int) -> list[torch.Tensor]:
    """Keys and values of a row's tokens, as its block table in the runner places them."""
    table = runner(core)._batch.table(row)
    slots = torch.tensor([int(table[p // BLOCK]) * BLOCK + p % BLOCK for p in range(num_tokens)])
    flat = [c.transpose(1, 2).flatten(0, 1) for pair in runner(core).caches for c in pair]
    return [c[slots.to(c.device)].cpu() for c in flat]


def check_random_aborts_leave_nothing_held(rig: Rig, num_requests: int, seed: int) -> None:
    """Arrivals and aborts at random on a small pool, one step ahead: every token is one it has alone.

    Half is batch work: paused beside other work, some of it riding along, and preempted with steps in flight.
    """
    rng = random.Random(seed)
    shared = rig.prompt(77, 32)
    kinds = [(shared + rig.prompt(i, 3 + 5 * i), 12 + 5 * i) for i in range(6)]
    want = [rig.solo(prompt, max_tokens=length) for prompt, length in kinds]
    core = rig.make(
        num_blocks=9, prefix_caching=True, max_num_batched_tokens=48, max_num_seqs=6, batch_class_tokens=2
    )
    left, live, told = num_requests, {}, {}
    while left or core.has_work:
        if left and rng.random() < 0.5:
            kind, name = rng.randrange(len(kinds)), f"r{left}"
            prompt, length = kinds[kind]
            priority = rng.choice([0, BATCH_PRIORITY])
            core.add(EngineRequest(name, prompt, greedy(length), priority=priority))
            live[name], told[name], left = kind, [], left - 1
        if live and rng.random() < 0.15:
            core.abort(rng.choice(list(live)))
        for delta in core.step():
            told[delta.request_id] += delta.token_ids
            kind = live[delta.request_id]
            got = told[delta.request_id]
            assert len(got) <= len(want[kind]) and (not rig.is_exact or got == want[kind][: len(got)])
            if delta.finish_reason is not None:
                assert delta.finish_reason == "abort" or len(got) == len(want[kind])
                del live[delta.request_id]
        core.scheduler.check()
    stats = core.stats()
    assert stats.kv_blocks_used == 0 and stats.preemptions > 0
    assert stats.finished["abort"] > 0 and stats.finished["length"] > 0


# --- one step ahead of the host -------------------------------------------------------------------------


def check_no_placeholder_reaches_the_model(rig: Rig, monkeypatch: Any) -> None:
    """Ids that nobody has drawn yet are -1 in every table: reading one before its time would show.

    Prompts in chunks, decodes, preemptions and rows used again, one step ahead.
    """
    lengths = (3, 18, 33, 40, 7, 25, 16, 31)
    requests = [EngineRequest(f"r{i}", rig.prompt(i, n), greedy(20)) for i, n in enumerate(lengths)]
    options: dict[str, Any] = {"num_blocks": 10, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    want = {key: answer.token_ids for key, answer in run(rig.make(**options), *requests).items()}
    core = rig.make(**options)
    if hasattr(runner(core)._graphs, "release"):
        runner(core)._graphs.release()  # a replayed graph can't be looked into
    runner(core)._state.tokens.fill_(-1)
    runner(core)._batch.tokens.fill(-1)
    decoder = runner(core)._model._decoder
    plain, lowest = decoder.hidden, []

    def watched(token_ids: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        lowest.append(int(token_ids.min()))
        assert lowest[-1] >= 0, "an id that nobody has drawn reached the model"
        hidden: torch.Tensor = plain(token_ids, *rest, **options)
        return hidden

    monkeypatch.setattr(decoder, "hidden", watched)
    assert {key: answer.token_ids for key, answer in run(core, *requests).items()} == want
    assert core.stats().preemptions > 0 and len(lowest) > 20


def check_arrivals_in_any_step_say_the_same(rig: Rig, *, ahead: bool) -> None:
    """Rows come and go step by step, so that sizes of steps change all the time, drawn rows among them."""
    settings = [{}, {"temperature": 0.9, "seed": 3}, {"temperature": 0.7, "top_k": 9, "seed": 8}]
    kinds = [(rig.prompt(i, 2 + 9 * i), settings[i % 3]) for i in range(12)]
    want = [rig.solo(prompt, max_tokens=4 + i, **params) for i, (prompt, params) in enumerate(kinds)]
    core = rig.make(async_scheduling=ahead)
    told: list[list[int]] = [[] for _ in kinds]
    waiting = list(enumerate(kinds))
    while waiting or core.has_work:
        for index, (prompt, params) in waiting[: 1 + len(waiting) % 2]:
            core.add(EngineRequest(str(index), prompt, greedy(**{"max_tokens": 4 + index} | params)))
        waiting = waiting[1 + len(waiting) % 2 :]
        for delta in core.step():
            told[int(delta.request_id)] += delta.token_ids
        core.scheduler.check()
    assert told == want if rig.is_exact else [len(t) for t in told] == [len(w) for w in want]


# --- blocks that are shared in the step that computes them ----------------------------------------------


def check_a_prefix_is_computed_once_in_the_step_that_all_arrive_in(rig: Rig) -> None:
    """Beginnings of four, three and two blocks, in chunks and whole, with ends of their own."""
    shared = rig.prompt(0, 70)
    prompts = [[*shared[: 70 - 16 * (i % 3)], *rig.prompt(1 + i, 1 + 9 * i)] for i in range(6)]
    want = [rig.solo(prompt) for prompt in prompts]
    for budget in (24, 48, 512):
        core = rig.make(128, prefix_caching=True, max_num_batched_tokens=budget, policy="fcfs")
        answers = run(core, *(EngineRequest(f"r{i}", p, greedy(OUTPUT)) for i, p in enumerate(prompts)))
        told = [answers[f"r{i}", 0].token_ids for i in range(6)]
        assert told == want if rig.is_exact else [len(t) for t in told] == [len(w) for w in want]
        stats = core.stats()
        # All blocks that any other begins with: 4, 3 and 2 of them, twice but for who comes first.
        assert stats.prefix_hits == 16 * (3 + 2 + 4 + 3 + 2)
        core.shutdown()
