"""The scheduler: which tokens of which sequences the next step computes, and in which blocks.

One quantity and one budget: each step hands out part of every sequence's uncomputed tokens under
`max_num_batched_tokens`, sequences with one token left (decodes) first, then prompt chunks in policy order.
Chunked prefill, prefix hits, forks for n > 1 and resumption after preemption are all this same case.

Steps may overlap by one: `schedule` may be called while the step before is still in flight. Rows and blocks
then return to their pools only after the last step that touches them was read by `update`. A preemption gives
them to others at once, so it never takes a sequence that a step in flight touches. Where one of its own class
would have to give way beside such a step, `schedule` raises DrainFirst: the caller reads it, and plans again.

Batch work is a class of its own, planned last under every policy; it gets what `BatchBounds` leaves it. While
other work is there its sequences may be paused: they keep row and blocks and are in no step. They give both
up as soon as other work lacks them, also beside a step in flight, since none touches them.

A request for n choices computes its prompt once. Choice 0 is the leader and enters the queue; the followers
are kept back until the leader's prompt is computed (or the leader is preempted or ends), then queue up like
any sequence and fork: they share the leader's full blocks, copy its last one, and recompute one token.
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from footplate.engine.config import EngineConfig
from footplate.engine.errors import EngineOverloaded, InvalidRequest
from footplate.engine.followers import Followers
from footplate.engine.kv.block_pool import BlockPool
from footplate.engine.plan import NewRow, ScheduledRow, SchedulerOutput, StepResult
from footplate.engine.prefix import PrefixHasher
from footplate.engine.reuse import can_fork, find_reusable, register_blocks
from footplate.engine.sequence import Sequence, SequenceState
from footplate.engine.step import Step, token_work
from footplate.engine.types import EngineRequest, EngineStats, FinishReason, SequenceDelta, TokenLogprob
from footplate.engine.validation import choice_seed, max_output_tokens, validate_request
from footplate.engine.work_class import BatchBounds, WorkClass

MIX = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads request numbers over the seed space


class DrainFirst(Exception):
    """A block is needed that only preemption can give, and a step is in flight: read it, then schedule."""


class Scheduler:
    """Owns all sequences, the waiting queue, rows and the block pool of one replica.

    Not thread-safe: one thread calls it. It never touches a tensor.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        prefix_key: bytes = b"",
        step_work: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`step_work` bounds the prompt work of a step, in tokens at depth 0. It is for devices where a step
        of the whole budget takes seconds: decodes and aborts wait for the step they are in.
        """
        self._hasher = PrefixHasher(prefix_key, config.block_size)
        self.pool = BlockPool(num_blocks, self._hasher, caching=config.prefix_caching)
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._config, self._clock = config, clock
        self._eos = frozenset(eos_token_ids)
        self._budget = config.max_num_batched_tokens
        self._step_work = step_work
        self._online = WorkClass(config.policy, step_work)
        # Fair between tenants, whatever the policy. Nobody feels a chunk of it: nothing is held up.
        self._batch = WorkClass("fair", math.inf)
        self._batch_bounds = BatchBounds.resolve(config, step_work)
        self._retiring: list[Sequence] = []  # finished; their last step is in flight
        self._requests: dict[str, list[Sequence]] = {}  # unfinished choices of live requests
        self._followers = Followers()
        self._free_rows = list(range(min(config.max_num_seqs, self._budget) - 1, -1, -1))
        self._steps: dict[int, list[tuple[Sequence, ScheduledRow]]] = {}  # in flight
        self._next_step = self._next_id = 0
        self._pending_deltas: list[SequenceDelta] = []
        self._counts = {"queries": 0, "hits": 0, "preemptions": 0, "prompt": 0, "generated": 0}
        self._finished = {reason.value: 0 for reason in FinishReason}

    # --- the door ---------------------------------------------------------------------------------------

    @property
    def kv_tokens(self) -> int:
        """The longest sequence the pool can hold alone, in tokens."""
        return self.pool.num_blocks * self.pool.block_size

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequest: a field is out of range, or the id is in use.
            RequestTooLarge: it can never fit the context or the pool.
            EngineOverloaded: the queue is full.
        """
        if request.request_id in self._requests:
            raise InvalidRequest(f"request id {request.request_id!r} is already running", "request_id")
        validate_request(request, self.vocab_size)
        work = self._batch if request.is_batch else self._online
        num_waiting = self._num_waiting(work)
        free = self._config.max_waiting - num_waiting
        # Under `fair` a tenant may have as many waiting as it leaves places: the queue is never one tenant's.
        own = work.waiting.num_of(request.tenant) if work.waiting.is_fair else 0
        if own + request.params.n > free:
            raise EngineOverloaded(f"{num_waiting} choices wait; the limit is {self._config.max_waiting}")
        max_output = max_output_tokens(request, self.max_model_len, self.kv_tokens)
        choices = [self._make_sequence(request, index, max_output) for index in range(request.params.n)]
        self._requests[request.request_id] = choices.copy()
        self._followers.keep(choices[0], choices[1:])
        self._enqueue(choices[0])

    def _make_sequence(self, request: EngineRequest, index: int, max_output: int) -> Sequence:
        number, self._next_id = self._next_id, self._next_id + 1
        seed = request.params.seed
        if seed is None:
            seed = random.Random(self._config.seed ^ (number * MIX)).getrandbits(63)
        return Sequence(
            id=number,
            request=request,
            index=index,
            params=dataclasses.replace(
                request.params,
                seed=choice_seed(seed, index),
                # told with choice 0 only; without them the others can share its prompt blocks
                prompt_logprobs=request.params.prompt_logprobs if index == 0 else None,
            ),
            max_output=max_output,
            arrival=number,
            root=self._hasher.root(request.cache_scope),
            token_ids=list(request.prompt_token_ids),
            num_prompt=len(request.prompt_token_ids),
            is_batch=request.is_batch,
        )

    def _class_of(self, sequence: Sequence) -> WorkClass:
        return self._batch if sequence.is_batch else self._online

    def _enqueue(self, sequence: Sequence) -> None:
        waiting = self._class_of(sequence).waiting
        waiting.counters.arrive(sequence.request.tenant)
        waiting.push(sequence)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one choice of it. Unknown and ended ids are fine: aborts come in any order."""
        for sequence in list(self._requests.get(request_id, ())):
            if index is None or sequence.index == index:
                self._finish(sequence, FinishReason.ABORT)
                self._pending_deltas.append(
                    SequenceDelta(request_id, sequence.index, finish_reason=FinishReason.ABORT)
                )

    # --- planning a step --------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether anything waits, runs, is in flight or is to be told."""
        return bool(self._online.has_work or self._batch.has_work or self._steps or self._pending_deltas)

    def schedule(self) -> SchedulerOutput | None:
        """Plan the next step and take its effects as done; None when there is nothing to compute now.

        Raises:
            DrainFirst: a step in flight must be read by `update` before this one can be planned.
        """
        step = Step(self._next_step, self._budget, self._step_work)
        preempted = self._yield_to_higher_class(step)
        preempted |= self._schedule_decodes(step, self._online)
        self._schedule_prompts(step, self._online, admit=not preempted)
        if self._batch.has_work:
            self._schedule_batch(step)
        if not step.rows:
            return None
        self._next_step += 1
        self._steps[step.number] = step.rows
        for sequence, scheduled in step.rows:
            self._commit(sequence, scheduled, step.number)
        return SchedulerOutput(
            step.number, tuple(r for _, r in step.rows), tuple(step.new_rows), tuple(step.copies)
        )

    def _schedule_batch(self, step: Step) -> None:
        """Hand batch work what the step has left for it; a short step of its own when nothing else is there.

        Whoever comes meanwhile waits for that step's end, so none is planned behind one in flight.
        """
        if self._online.has_work:
            step.bound(self._batch_bounds.beside)
            if step.budget > 0 and not step.lacks_room:
                self._schedule_decodes(step, self._batch)
                if step.has_prompts:  # on a GPU a step of decodes alone is one graph: it stays so
                    self._schedule_prompts(step, self._batch, admit=True)
        elif not self._steps:
            step.begin_batch_alone(self._batch_bounds.alone)
            preempted = self._schedule_decodes(step, self._batch)
            self._schedule_prompts(step, self._batch, admit=not preempted)
        served = {sequence.id for sequence, _ in step.rows}
        self._batch.running.sort(key=lambda s: s.id in served)  # who found no place in the step is next

    def _schedule_decodes(self, step: Step, work: WorkClass) -> bool:
        """Hand one token to each sequence that only decodes; whether one of them had to be preempted."""
        preempted = False
        decodes = [s for s in work.running if not s.is_prefilling and not s.awaits_last_token]
        if self.pool.num_free < len(decodes):
            decodes.sort(key=self._rank)  # who comes last may have to give way
        may_preempt = work is self._online or step.is_batch_alone
        for sequence in decodes:
            if sequence.state is not SequenceState.RUNNING or not step.takes_decodes:
                continue  # preempted by one before it
            while not self._hand_out(step, sequence, 1) and may_preempt:
                preempted = True
                if self._preempt_for(step, sequence):
                    break
        return preempted

    def _schedule_prompts(self, step: Step, work: WorkClass, *, admit: bool) -> None:
        """Hand prompt chunks to running and newly admitted sequences, together in policy order."""
        key, waiting, allowance = work.waiting.key, work.waiting, work.allowance
        running = sorted((s for s in work.running if s.is_prefilling), key=key, reverse=True)
        allowance.begin_step(Counter(sequence.request.tenant for sequence, _ in step.rows))
        wanting = {s.request.tenant for s in running} | (waiting.lanes() if admit else set())
        held: set[str] = set()  # tenants whose prompts get no more of this step
        while step.budget > 0 and step.work > 0:
            head = waiting.peek(held) if admit and self._may_have_row(work) else None
            if head is None and not running:
                return
            is_new = head is not None and (not running or key(head) < key(running[-1]))
            sequence = head if head is not None and is_new else running.pop()
            others = bool(running) or (len(waiting) > 1 if is_new else head is not None)
            tenant, before = sequence.request.tenant, step.work
            wanted = self._wanted(sequence) if allowance.is_on else 0.0
            share = allowance.share(tenant, wanted, others_want=len(wanting - {tenant}) > 0)
            if share > 0:
                share = min(share, self._share(step, others))
                handed = (self._admit if is_new else self._hand_out_chunk)(step, sequence, share)
                if handed:  # whoever comes behind it in this very step finds its blocks
                    register_blocks(self.pool, sequence, step.rows[-1][1].end)
                admit &= handed
                allowance.spend(tenant, wanted, before - step.work)
            else:
                held.add(tenant)

    def _wanted(self, sequence: Sequence) -> float:
        """The prompt work that a sequence still wants; what is cached is none."""
        cached = find_reusable(self.pool, sequence)[2] if sequence.state is SequenceState.WAITING else 0
        return (sequence.num_uncomputed - cached) * token_work(sequence.num_known)

    def _share(self, step: Step, others: bool) -> float:
        """The prompt work one sequence may take: under `fair` half a step at most while others want some.

        So a short prompt never waits for the whole of a long one, also within a tenant.
        """
        return min(step.work, self._step_work / 2) if others and self._config.policy == "fair" else step.work

    def _hand_out(self, step: Step, sequence: Sequence, num_tokens: int) -> bool:
        """Give a running sequence tokens of this step, and the blocks for them; False if blocks lack."""
        assert num_tokens > 0, "a row of no tokens is no work"
        start = sequence.num_computed
        lacking = self.pool.blocks_for(start + num_tokens) - len(sequence.block_table)
        if lacking > 0:
            blocks = self.pool.allocate(lacking)
            if blocks is None and not sequence.is_batch:
                self._take_from_batch(step, lambda: self.pool.num_free >= lacking)
                blocks = self.pool.allocate(lacking)
            if blocks is None:
                return False
            sequence.block_table.extend(blocks)
        samples = start + num_tokens == sequence.num_known and sequence.max_output > 0
        table = sequence.block_table
        new_blocks = tuple(table[sequence.num_sent_blocks :]) if len(table) > sequence.num_sent_blocks else ()
        row = ScheduledRow(sequence.row, sequence.id, start, num_tokens, samples, new_blocks)
        step.add(sequence, row)
        return True

    def _commit(self, sequence: Sequence, scheduled: ScheduledRow, step: int) -> None:
        sequence.num_computed += scheduled.num_tokens
        sequence.num_pending += scheduled.samples
        sequence.last_step = step
        sequence.num_sent_blocks = len(sequence.block_table)
        self._class_of(sequence).waiting.counters.charge(sequence, scheduled.num_tokens)
        register_blocks(self.pool, sequence, sequence.num_computed)
        if self._followers and sequence.num_computed >= sequence.num_prompt:
            self._free_followers(sequence)

    # --- admission, forks and preemption ----------------------------------------------------------------

    def _admit(self, step: Step, sequence: Sequence, share: float) -> bool:
        """Start a waiting sequence: take up cached blocks, then its first chunk. False when it must wait."""
        work = self._class_of(sequence)
        blocks, entries, computed = find_reusable(self.pool, sequence)
        if not self._find_room(step, sequence, blocks, computed):
            return False
        work.waiting.pop(sequence)
        self.pool.share(blocks)
        sequence.block_table = list(blocks)
        sequence.entries, sequence.num_computed = entries, computed
        self._fork_last_block(step, sequence)
        self._count_hit(sequence)
        sequence.state = SequenceState.RUNNING
        sequence.row = self._free_rows.pop()
        work.running.append(sequence)
        table = tuple(sequence.block_table)
        sequence.num_sent_blocks = len(table)
        step.new_rows.append(
            NewRow(sequence.row, tuple(sequence.token_ids), sequence.num_prompt, sequence.params, table)
        )
        handed = self._hand_out(step, sequence, step.chunk(sequence, share))
        assert handed, "admission checked that the blocks are there"
        return True

    def _may_have_row(self, work: WorkClass) -> bool:
        """Whether one more of a class may run, should it find a row."""
        if work is self._online:
            return bool(self._free_rows or self._batch.running)
        limit = self._batch_bounds.max_running(is_alone=not self._online.has_work)
        return bool(self._free_rows) and len(work.running) < limit

    def _find_room(self, step: Step, sequence: Sequence, shared: Seq[int], computed: int) -> bool:
        """Whether a row is free and the pool holds all of a sequence that is known, batch work preempted."""
        wanted = self.pool.blocks_for(sequence.num_known) - len(shared)
        # A margin for the running ones avoids thrashing.
        wanted += len(self._online.running) // self.pool.block_size

        def fits() -> bool:
            return bool(self._free_rows) and wanted + self.pool.count_free(shared) <= self.pool.num_free

        if sequence.is_batch:
            wanted += len(self._batch.running) // self.pool.block_size
            return fits()
        return self._take_from_batch(step, fits)

    def _fork_last_block(self, step: Step, sequence: Sequence) -> None:
        """Copy-on-write of the block both choices go on in; a fork recomputes the last prompt token only."""
        if not can_fork(sequence) or sequence.num_computed % self.pool.block_size == 0:
            return
        leader = sequence.leader
        own = self.pool.allocate(1)
        assert leader is not None and own is not None, "admission checked that the block is there"
        step.copies.append((leader.block_table[len(sequence.block_table)], own[0]))
        leader.last_step = max(leader.last_step, step.number)
        sequence.block_table += own

    def _count_hit(self, sequence: Sequence) -> None:
        if not sequence.was_admitted and sequence.leader is None:
            sequence.cached_tokens = sequence.num_computed
            self._counts["prompt"] += sequence.num_prompt
            self._counts["queries"] += sequence.num_prompt
            self._counts["hits"] += sequence.num_computed
        if sequence.scheduled_at is None:
            sequence.scheduled_at = self._clock()

    def _rank(self, sequence: Sequence) -> tuple[int, int]:
        """The highest rank is preempted first: the lowest class, and in it the newest."""
        return (self._online.waiting.priority(sequence), sequence.arrival)

    def _take_from_batch(self, step: Step, fits: Callable[[], bool]) -> bool:
        """Preempt batch work until other work `fits`; whether it does.

        No step in flight touches a paused sequence, so it can go at once. The others stay out of this step,
        and go in the next.
        """
        while not fits():
            paused = [s for s in self._batch.running if not self._is_in_flight(s)]
            if not paused:
                step.lacks_room = True
                return False
            self._preempt(max(paused, key=self._rank))
        return True

    def _is_in_flight(self, sequence: Sequence) -> bool:
        return bool(self._steps) and sequence.last_step >= min(self._steps)

    def _yield_to_higher_class(self, step: Step) -> bool:
        """Preempt running work of a lower priority when a waiting sequence of a higher one finds no room."""
        preempted, online = False, self._online
        while self._config.policy != "fcfs" and online.running:
            head, worst = online.waiting.peek(), max(online.running, key=self._rank)
            if head is None or head.request.priority >= worst.request.priority:
                break
            blocks, _, computed = find_reusable(self.pool, head)
            if self._find_room(step, head, blocks, computed) or self._batch.running:
                break  # or it is found in the next step, when batch work has left this one
            if self._steps:
                raise DrainFirst
            self._preempt(worst)
            preempted = True
        return preempted

    def _preempt_for(self, step: Step, sequence: Sequence) -> bool:
        """Preempt the lowest, newest running sequence of a class; True when that was `sequence` itself."""
        if self._steps:
            raise DrainFirst
        scheduled = {s.id for s, _ in step.rows}
        running = self._class_of(sequence).running
        victim = max((s for s in running if s.id not in scheduled), key=self._rank)
        self._preempt(victim)
        return victim is sequence

    def _hand_out_chunk(self, step: Step, sequence: Sequence, share: float) -> bool:
        """Give a running prompt its next chunk; False when blocks lacked and it got less, or gave way."""
        chunk = step.chunk(sequence, share)
        if sequence.state is not SequenceState.RUNNING or self._hand_out(step, sequence, chunk):
            return sequence.state is SequenceState.RUNNING
        if self._hand_out_room(step, sequence, chunk):
            return False
        # When nothing else moves, the lowest and newest must go; if its blocks are all shared, the next too.
        while not step.rows and not self._preempt_for(step, sequence):
            self._hand_out_room(step, sequence, chunk)
        return False

    def _hand_out_room(self, step: Step, sequence: Sequence, most: int) -> bool:
        """Give a running prompt as many tokens as there are blocks for; whether there was room for one."""
        room = (len(sequence.block_table) + self.pool.num_free) * self.pool.block_size - sequence.num_computed
        return room > 0 and self._hand_out(step, sequence, min(room, most))

    def _preempt(self, sequence: Sequence) -> None:
        assert not self._is_in_flight(sequence), "a step in flight touches the sequence to be preempted"
        self._counts["preemptions"] += 1
        work = self._class_of(sequence)
        work.running.remove(sequence)
        self._give_back(sequence)
        sequence.state, sequence.num_computed = SequenceState.WAITING, 0
        sequence.prompt_logprobs = []  # they are made anew with the prompt
        self._free_followers(sequence)
        work.waiting.push(sequence)

    def _free_followers(self, leader: Sequence) -> None:
        for follower in self._followers.free(leader):
            self._enqueue(follower)

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.block_table, sequence.entries, sequence.chain_broken = [], [], False
        sequence.num_sent_blocks = 0
        self._free_rows.append(sequence.row)
        sequence.row = -1

    # --- reading a step ---------------------------------------------------------------------------------

    def update(self, result: StepResult) -> list[SequenceDelta]:
        """Take in what a step drew; gives what is new to tell, aborts included."""
        deltas = self.take_deltas()
        for sequence, scheduled in self._steps.pop(result.step):
            if sequence.is_finished:
                continue  # ended while the step was in flight: its draw is discarded
            delta = self._read_row(sequence, scheduled, result)
            if delta is not None:
                deltas.append(delta)
        for sequence in [s for s in self._retiring if s.last_step <= result.step]:
            self._retiring.remove(sequence)
            self._give_back(sequence)
        return deltas

    def take_deltas(self) -> list[SequenceDelta]:
        """What is to be told without a step: ends by abort."""
        deltas, self._pending_deltas = self._pending_deltas, []
        return deltas

    def _read_row(
        self, sequence: Sequence, scheduled: ScheduledRow, result: StepResult
    ) -> SequenceDelta | None:
        if sequence.params.prompt_logprobs is not None and scheduled.start < sequence.num_prompt - 1:
            sequence.prompt_logprobs += result.prompt_logprobs.get(sequence.id, [])
        if not scheduled.samples:
            if sequence.max_output > 0 or scheduled.start + scheduled.num_tokens < sequence.num_prompt:
                return None
            empty = SequenceDelta(sequence.request.request_id, sequence.index)
            return self._told(sequence, empty, FinishReason.LENGTH)
        token = result.tokens[sequence.id]
        sequence.num_pending -= 1
        sequence.token_ids.append(token)
        self._counts["generated"] += 1
        register_blocks(self.pool, sequence, sequence.num_computed)
        delta = SequenceDelta(sequence.request.request_id, sequence.index, (token,))
        if sequence.params.logprobs is not None:
            delta.logprobs = (result.logprobs[sequence.id],)
        return self._told(sequence, delta, self._reason_to_stop(sequence, token))

    def _told(self, sequence: Sequence, delta: SequenceDelta, reason: FinishReason | None) -> SequenceDelta:
        """Add what only a choice's first delta carries, and end the sequence if there is a reason to."""
        if len(sequence.token_ids) - sequence.num_prompt <= 1 and sequence.index == 0:
            delta.cached_tokens, delta.scheduled_at = sequence.cached_tokens, sequence.scheduled_at
            if sequence.params.prompt_logprobs is not None:
                first: tuple[TokenLogprob | None, ...] = (None,)
                delta.prompt_logprobs = first + tuple(sequence.prompt_logprobs[: sequence.num_prompt - 1])
                sequence.prompt_logprobs = []
        delta.finish_reason = reason
        if reason is not None:
            self._finish(sequence, reason)
        return delta

    def _reason_to_stop(self, sequence: Sequence, token: int) -> FinishReason | None:
        params, num_output = sequence.params, len(sequence.token_ids) - sequence.num_prompt
        if num_output >= params.min_tokens:
            if token in params.stop_token_ids or (token in self._eos and not params.ignore_eos):
                return FinishReason.STOP
        return FinishReason.LENGTH if num_output >= sequence.max_output else None

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Take a sequence out; its row and blocks return after the last step that touches them."""
        work = self._class_of(sequence)
        if sequence.state is SequenceState.RUNNING:
            work.running.remove(sequence)
            if self._is_in_flight(sequence):
                self._retiring.append(sequence)
            else:
                self._give_back(sequence)
            work.waiting.counters.leave(sequence.request.tenant)
        elif not self._followers.end(sequence):
            work.waiting.discard(sequence)
            work.waiting.counters.leave(sequence.request.tenant)
        sequence.state, sequence.prompt_logprobs = SequenceState.FINISHED, []
        self._finished[reason.value] += 1
        self._free_followers(sequence)
        choices = self._requests[sequence.request.request_id]
        choices.remove(sequence)
        if not choices:
            del self._requests[sequence.request.request_id]

    # --- looking at it ----------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        return len(self._steps)

    @property
    def num_waiting(self) -> int:
        """Choices that wait for admission, those held back behind their request's first included."""
        return self._num_waiting(self._online) + self._num_waiting(self._batch)

    def _num_waiting(self, work: WorkClass) -> int:
        return len(work.waiting) + self._followers.count(is_batch=work is self._batch)

    def live_sequences(self) -> list[Sequence]:
        """Sequences that hold blocks, ended ones whose last step is in flight too. For looking only."""
        return self._online.running + self._batch.running + self._retiring

    def stats(self) -> EngineStats:
        counts = self._counts
        return EngineStats(
            # One that has ended still computes until its last step is read.
            running=len(self.live_sequences()),
            waiting=self.num_waiting,
            batch_running=sum(s.is_batch for s in self.live_sequences()),
            batch_waiting=self._num_waiting(self._batch),
            prefill_tokens=self._online.prefill_tokens,
            kv_blocks_total=self.pool.num_blocks,
            kv_blocks_used=self.pool.num_held,
            block_size=self.pool.block_size,
            prefix_queries=counts["queries"],
            prefix_hits=counts["hits"],
            preemptions=counts["preemptions"],
            prompt_tokens=counts["prompt"],
            generation_tokens=counts["generated"],
            steps=self._next_step,
            finished=dict(self._finished),
        )

    def check(self) -> None:
        """Assert conservation: free + held + in flight = total, rows likewise, and no count out of range."""
        live = self.live_sequences()
        self.pool.check(s.block_table for s in live)
        rows = [s.row for s in live] + self._free_rows
        assert len(rows) == len(set(rows)) == min(self._config.max_num_seqs, self._budget), "a row leaked"
        for s in self._online.running + self._batch.running:
            assert 0 <= s.num_computed <= s.num_known and 0 <= s.num_pending <= 1
            assert len(s.block_table) >= self.pool.blocks_for(s.num_computed)
        for work in (self._online, self._batch):
            assert len(work.waiting) == sum(1 for _ in work.waiting), "the waiting count is off"
            assert all(self._class_of(s) is work for s in (*work.running, *work.waiting))
        if not self.has_work:
            assert not self._requests and not self._followers and not self.pool.num_held, "idle but not empty"
