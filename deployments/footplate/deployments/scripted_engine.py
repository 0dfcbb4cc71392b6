"""An engine with a script in place of a model: one token per running sequence and step, at a set pace.

It stands in for the real engine wherever the road of the tokens is the subject: tests of the Serve stack and
the benchmark of the token path. It remembers the blocks of the prompts it had, and does nothing with them.
Its source reads `scripted:step_ms=2,journal=/file`; the journal gets a JSON line for each request added,
aborted or finished, with the process, the step and the monotonic time.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from footplate.deployments.engine_port import DeliverTokens
from footplate.engine.config import EngineConfig
from footplate.engine.errors import EngineDead, EngineOverloaded, InvalidRequest, LoadError, RequestTooLarge
from footplate.engine.kv.block_log import BlockChanges, BlockLog
from footplate.engine.prefix import PrefixHasher
from footplate.engine.types import EngineRequest, EngineStats, FinishReason, SequenceDelta

DEFAULT_MAX_TOKENS = 16
MAX_CACHED_BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class Script:
    """The options of a scripted source."""

    step_ms: float = 5.0  # 0: as fast as the thread can
    journal: str = ""
    max_model_len: int = 2048
    vocab_size: int = 49152
    first_id: int = 300  # ids count up from here and wrap after `num_ids`
    num_ids: int = 512
    load_ms: float = 0.0

    @staticmethod
    def parse(source: str) -> Script:
        """Read `scripted:name=value,...`.

        Raises:
            LoadError: an unknown option or a value that is no number.
        """
        options: dict[str, str | float | int] = {}
        for pair in filter(None, source.removeprefix("scripted:").split(",")):
            name, _, value = pair.partition("=")
            kind = {"journal": str, "step_ms": float, "load_ms": float}.get(name, int)
            try:
                options[name] = kind(value)
            except ValueError as error:
                raise LoadError(f"scripted option {name}={value} is no {kind.__name__}") from error
        try:
            return Script(**options)  # type: ignore[arg-type]  # each option was converted to its field's type
        except TypeError as error:
            raise LoadError(f"{source!r} has an unknown scripted option: {error}") from error


@dataclass(slots=True)
class _Running:
    request: EngineRequest
    max_tokens: int
    open_choices: set[int]
    num_generated: int = 0


@dataclass(slots=True)
class _Counters:
    steps: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)


class ScriptedEngine:
    """Keeps the promises of `ReplicaEngine` without weights."""

    dtype = "scripted"
    fingerprint = "fp_scripted"

    def __init__(
        self, script: Script, config: EngineConfig, deliver: DeliverTokens, prefix_key: bytes = b""
    ) -> None:
        self.max_model_len = script.max_model_len
        self.kv_tokens = script.max_model_len * config.max_num_seqs
        self.vocab_size = script.vocab_size
        self._script = script
        self._config = config
        self._deliver = deliver
        self._lock = threading.Lock()
        self._running: dict[str, _Running] = {}
        # Ends of what was aborted, for the next delivery.
        self._aborted: list[SequenceDelta] = []
        self._counters = _Counters()
        self._hasher = PrefixHasher(prefix_key, config.block_size)
        self._cached: OrderedDict[bytes, None] = OrderedDict()
        self._log = BlockLog()
        self._work = threading.Event()
        self._is_over = False
        self._beat_at = time.monotonic()
        self._thread = threading.Thread(target=self._loop, name="scripted-engine", daemon=True)
        self._thread.start()

    @staticmethod
    def load(
        source: str,
        config: EngineConfig,
        *,
        deliver: DeliverTokens,
        prefix_key: bytes = b"",
        models_dir: Path | None = None,
    ) -> ScriptedEngine:
        """Start the thread and give the engine, after the script's loading time."""
        script = Script.parse(source)
        time.sleep(script.load_ms / 1000)
        return ScriptedEngine(script, config, deliver, prefix_key)

    def add(self, request: EngineRequest) -> None:
        max_tokens = request.params.max_tokens or DEFAULT_MAX_TOKENS
        num_prompt = len(request.prompt_token_ids)
        if not num_prompt:
            raise InvalidRequest("the prompt is empty; send at least one token", "prompt")
        if num_prompt + max_tokens > self.max_model_len:
            raise RequestTooLarge(
                f"{num_prompt} prompt and {max_tokens} output tokens; the context holds {self.max_model_len}"
            )
        with self._lock:
            if self._is_over:
                raise EngineDead("the engine has been shut down")
            if len(self._running) >= self._config.max_num_seqs + self._config.max_waiting:
                raise EngineOverloaded(f"{len(self._running)} requests are waiting or running; try later")
            self._running[request.request_id] = _Running(request, max_tokens, set(range(request.params.n)))
            self._counters.prompt_tokens += num_prompt
            self._remember(request)
            self._note("add", request.request_id)
        self._work.set()

    def abort(self, request_id: str, index: int | None = None) -> None:
        with self._lock:
            running = self._running.get(request_id)
            if running is None:
                return
            given_up = running.open_choices & ({index} if index is not None else running.open_choices)
            self._aborted += [
                SequenceDelta(request_id, each, finish_reason=FinishReason.ABORT) for each in sorted(given_up)
            ]
            running.open_choices -= given_up
            if not running.open_choices:
                del self._running[request_id]
                self._finish(request_id, FinishReason.ABORT)

    def stats(self) -> EngineStats:
        counters, running = self._counters, len(self._running)
        return EngineStats(
            running=min(running, self._config.max_num_seqs),
            waiting=max(0, running - self._config.max_num_seqs),
            kv_blocks_total=self.kv_tokens // self._config.block_size,
            kv_blocks_used=running,
            block_size=self._config.block_size,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            steps=counters.steps,
            finished=dict(counters.finished),
        )

    def block_changes(self, *, whole: bool = False) -> BlockChanges:
        """As `ReplicaEngine.block_changes`."""
        with self._lock:
            changes = None if whole else self._log.take()
            if changes is None:
                self._log.turn_on()
                return BlockChanges(tuple(self._cached), is_all=True)
            return changes

    def heartbeat_age_s(self) -> float:
        return time.monotonic() - self._beat_at

    def shutdown(self) -> None:
        with self._lock:
            self._is_over = True
        self._work.set()
        self._thread.join(timeout=5)

    def _loop(self) -> None:
        step_s = self._script.step_ms / 1000
        due = 0.0
        while not self._is_over:
            self._beat_at = now = time.monotonic()
            # Late steps are made up for, so that the pace holds on a busy machine; a long halt is not.
            due = max(due + step_s, now - 10 * step_s)
            if not (self._running or self._aborted):
                self._work.clear()
                if not self._running:
                    self._work.wait(0.2)
                continue
            deltas = self._step()
            if deltas:
                self._deliver(deltas)
            time.sleep(max(0.0, due - time.monotonic()))
        self._end_all()

    def _step(self) -> list[SequenceDelta]:
        script, counters = self._script, self._counters
        with self._lock:
            deltas, self._aborted = self._aborted, []
            counters.steps += 1
            for request_id, running in list(self._running.items())[: self._config.max_num_seqs]:
                token_ids = (script.first_id + running.num_generated % script.num_ids,)
                running.num_generated += 1
                is_last = running.num_generated >= running.max_tokens
                reason = FinishReason.LENGTH if is_last else None
                for index in running.open_choices:
                    delta = SequenceDelta(request_id, index, token_ids, None, reason)
                    if running.num_generated == 1 and index == 0:
                        delta.scheduled_at = self._beat_at
                    deltas.append(delta)
                counters.generation_tokens += len(running.open_choices)
                if is_last:
                    del self._running[request_id]
                    self._finish(request_id, FinishReason.LENGTH)
        return deltas

    def _remember(self, request: EngineRequest) -> None:
        keys = self._hasher.chain(request.prompt_token_ids, request.cache_scope)
        self._counters.prefix_queries += len(request.prompt_token_ids)
        self._counters.prefix_hits += sum(key in self._cached for key in keys) * self._hasher.block_size
        for key in keys:
            self._cached[key] = None
            self._log.store(key)
        while len(self._cached) > MAX_CACHED_BLOCKS:
            self._log.evict(self._cached.popitem(last=False)[0])

    def _end_all(self) -> None:
        with self._lock:
            left, self._running = self._running, {}
        reason, why = FinishReason.ERROR, "the engine was shut down"
        deltas = [
            SequenceDelta(request_id, index, finish_reason=reason, error=why)
            for request_id, running in left.items()
            for index in running.open_choices
        ]
        if deltas:
            self._deliver(deltas)

    def _finish(self, request_id: str, reason: FinishReason) -> None:
        finished = self._counters.finished
        finished[reason] = finished.get(reason, 0) + 1
        self._note(reason, request_id)

    def _note(self, event: str, request_id: str) -> None:
        if not self._script.journal:
            return
        line = {
            "event": event,
            "request_id": request_id,
            "pid": os.getpid(),
            "step": self._counters.steps,
            "at": time.monotonic(),
        }
        with open(self._script.journal, "a", encoding="utf-8") as journal:
            journal.write(json.dumps(line) + "\n")
