"""Reads a batch's file before any of it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from footplate.engine.errors import EngineOverloaded
from footplate.platform.admission import authorise
from footplate.platform.batches.lines import LineScanner
from footplate.platform.batches.store import BatchQueue, ByteStore
from footplate.platform.batches.threads import StoreThreads
from footplate.platform.batches.values import Batch, LineFault
from footplate.platform.errors import ModelNotFound
from footplate.platform.models import NO_SUCH_MODEL, find_model
from footplate.platform.ports import InferenceClient, KeyFinder
from footplate.platform.routes import check_may_end
from footplate.routing.cascade import Cascade

WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Validation:
    """What validating needs."""

    queue: BatchQueue
    data: ByteStore
    keys: KeyFinder
    client: InferenceClient
    threads: StoreThreads
    worker: str
    cascades: Mapping[str, Cascade] = field(default_factory=dict)

    async def run(self, batch: Batch, is_lost: Callable[[], bool]) -> bool | None:
        """Accept or reject a batch; True when it was accepted, None when it waits or another has it.

        Raises:
            BatchStoreAway, FileStoreAway, StoreUnavailable: something can't be asked.
        """
        scanner = await self.threads.ask(lambda: self._scan(batch, is_lost))
        if scanner is None:
            return None
        faults = list(scanner.faults)
        model = ""
        if not faults:
            try:
                model = await self._model(batch, scanner.model or "")
            except EngineOverloaded:
                # No model has told of itself yet: whether there is this one can't be said.
                await self.threads.ask(lambda: self.queue.put_off(batch.id, self.worker, WAIT_S))
                return None
            except ModelNotFound:
                faults.append(
                    LineFault("model_not_found", NO_SUCH_MODEL, scanner.spans[0].number, "body.model")
                )
        if faults:
            done = await self.threads.ask(lambda: self.queue.reject(batch.id, self.worker, faults))
            return False if done else None
        done = await self.threads.ask(lambda: self.queue.accept(batch.id, self.worker, model, scanner.spans))
        return True if done else None

    def _scan(self, batch: Batch, is_lost: Callable[[], bool]) -> LineScanner | None:
        scanner = LineScanner(batch.endpoint)
        pieces = self.data.pieces(batch.input_key)
        if pieces is None:
            scanner.faults.append(LineFault("invalid_file", "The input file is not there any more."))
            return scanner
        for piece in pieces:
            scanner.feed(piece)
            if is_lost():
                return None
        scanner.close()
        return scanner

    async def _model(self, batch: Batch, name: str) -> str:
        """The served model of that name, which the batch's key may use; or the route, which may serve it."""
        models, principal = self.client.models(), await self.keys.find(batch.key_id)
        if name in self.cascades:
            if principal is not None:
                check_may_end(self.cascades[name], principal, models)
            return name
        card = find_model(models, name)
        # What becomes of a batch whose key is no more is said by its lines, as a request would be told.
        if principal is not None:
            authorise(principal, card)
        return card.name
