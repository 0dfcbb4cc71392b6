"""The engine for servers: a step loop in a thread of its own, callbacks once a step."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from footplate.engine.config import EngineConfig
from footplate.engine.core import EngineCore
from footplate.engine.errors import EngineDead, EngineOverloaded
from footplate.engine.kv.block_log import BlockChanges
from footplate.engine.memory import give_back_memory
from footplate.engine.types import EngineRequest, EngineStats, FinishReason, SequenceDelta

logger = logging.getLogger(__name__)

Deliver = Callable[[Sequence[SequenceDelta]], None]
IDLE_BEAT_S = 0.5  # how often an idle loop shows that it lives


class AsyncEngine:
    """Steps while there is work, sleeps otherwise. All methods may be called from any thread.

    `deliver` is called on the engine's thread once a step with everything new, ends included, and must
    return quickly. Each accepted choice gets exactly one delta with a finish reason, unless the process is
    killed.
    """

    def __init__(
        self,
        core: EngineCore,
        deliver: Deliver,
        *,
        max_model_len: int,
        vocab_size: int,
        dtype: str,
        fingerprint: str,
    ) -> None:
        self.max_model_len = max_model_len
        self.kv_tokens = core.scheduler.kv_tokens
        self.vocab_size = vocab_size
        self.dtype = dtype
        self.fingerprint = fingerprint
        self.core = core
        self._deliver = deliver
        self._live: dict[str, set[int]] = {}  # request id -> unfinished choices, should the loop die
        self._wake = threading.Condition(core.lock)
        self._stopping = False
        self._fault: str | None = None
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="footplate-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(
        cls,
        source: str,
        config: EngineConfig,
        *,
        deliver: Deliver,
        prefix_key: bytes = b"",
        models_dir: Path | None = None,
    ) -> AsyncEngine:
        """Load a model and start stepping.

        Raises:
            LoadError: the model can't be loaded.
        """
        from footplate.engine.loader import load_engine  # torch is imported here, not with the class

        loaded = load_engine(source, config, prefix_key=prefix_key, models_dir=models_dir)
        gc.collect()
        gc.freeze()  # the weights' many small objects are never looked at again by the collector
        return cls(
            loaded.core,
            deliver,
            max_model_len=loaded.max_model_len,
            vocab_size=loaded.model_config.vocab_size,
            dtype=loaded.dtype,
            fingerprint=loaded.fingerprint,
        )

    def add(self, request: EngineRequest) -> None:
        """Queue a request; its deltas come through `deliver`.

        Raises:
            InvalidRequest, RequestTooLarge: it is wrong or can never fit.
            EngineOverloaded: the queue is full, or the engine is shutting down.
            EngineDead: the step loop has failed.
        """
        with self._wake:
            if self._fault is not None:
                raise EngineDead(self._fault)
            if self._stopping:
                raise EngineOverloaded("this engine is shutting down; send the request again")
            self.core.scheduler.add(request)
            self._live[request.request_id] = set(range(request.params.n))
            self._wake.notify()

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request or one choice of it; its end is delivered. Fine at any time, any number of times."""
        with self._wake:
            if self._fault is None:
                self.core.scheduler.abort(request_id, index)
                self._wake.notify()

    def stats(self) -> EngineStats:
        return self.core.stats()

    def block_changes(self, *, whole: bool = False) -> BlockChanges:
        """What came into the prefix cache and went since the call before; `whole`: all that is there."""
        return self.core.block_changes(whole=whole)

    def heartbeat_age_s(self) -> float:
        """Seconds since the loop last came round; infinite once it has failed."""
        return float("inf") if self._fault is not None else time.monotonic() - self._beat

    def shutdown(self) -> None:
        """Abort what runs, deliver the ends and stop. Idempotent."""
        with self._wake:
            self._stopping = True
            if self._fault is None:
                for request_id in list(self._live):
                    self.core.scheduler.abort(request_id)
            self._wake.notify()
        self._thread.join()
        self.core.shutdown()
        # What `load` froze can be collected again: a model that is let go is gigabytes.
        gc.unfreeze()
        give_back_memory()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._tell(self.core.step())
                self._beat = time.monotonic()
        except Exception as error:
            self._die(error)

    def _wait_for_work(self) -> bool:
        """False when the engine is to stop and nothing is left to tell."""
        with self._wake:
            while not self.core.has_work:
                if self._stopping:
                    return False
                self._wake.wait(IDLE_BEAT_S)
                self._beat = time.monotonic()
        return True

    def _tell(self, deltas: list[SequenceDelta]) -> None:
        if not deltas:
            return
        for delta in deltas:
            if delta.finish_reason is not None:
                left = self._live[delta.request_id]
                left.remove(delta.index)
                if not left:
                    del self._live[delta.request_id]
        self._deliver(deltas)

    def _die(self, error: Exception) -> None:
        """End every live request with an error; the message names the kind of fault and no content."""
        with self._wake:
            self._fault = f"the engine's step loop failed with {type(error).__name__}"
            live, self._live = self._live, {}
        logger.error("%s", self._fault, exc_info=error)
        ends = [
            SequenceDelta(request_id, index, finish_reason=FinishReason.ERROR, error="engine_dead")
            for request_id, choices in live.items()
            for index in sorted(choices)
        ]
        try:
            self._deliver(ends)
        except Exception:
            logger.exception("the ends of %d requests could not be delivered", len(live))
