"""One engine behind Ray Serve, which starts, watches and stops it; requests and tokens go by the channel.

A plain class; the composition root wraps it. Serve runs every method on one event loop; the engine steps on a
thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

from footplate.deployments.autoscaling.serve_policy import recorded
from footplate.deployments.channel.frames import Status
from footplate.deployments.channel.outlet import OutletLimits, TokenOutlet
from footplate.deployments.channel.publisher import BlockPublisher
from footplate.deployments.engine_journal import EngineJournal
from footplate.deployments.engine_metrics import EngineMetrics
from footplate.deployments.engine_port import ReplicaEngine, find_loader
from footplate.deployments.leaving import notice_file, read_notice
from footplate.deployments.logs import configure_logging
from footplate.deployments.model_registry.start_faults import EngineStartFault, reason_of
from footplate.deployments.replica_telemetry import ReplicaTelemetry
from footplate.deployments.specs import ReplicaSpec, replica_label
from footplate.engine.errors import EngineDead, EngineError
from footplate.engine.types import EngineRequest, ModelCard, SequenceDelta
from footplate.tenancy.secrets import MasterKey

logger = logging.getLogger(__name__)

# A step on a slow CPU takes seconds, so a replica is only replaced when its loop is silent for much longer.
MAX_HEARTBEAT_AGE_S = 60.0
STOP_LOOK_S = 0.1
NOTICE_LOOK_S = 0.25
CHANNEL_PURPOSE = "token-channel"
# Gateways know the keys of cached blocks as engines do; nobody else can make them.
PREFIX_PURPOSE = "prefix-hash"


class EngineReplica:
    """Owns one engine and its end of the token channel."""

    async def __init__(self, spec: ReplicaSpec, find_index: Callable[[], str]) -> None:  # type: ignore[misc]
        # Serve awaits constructors; the load is moved off the loop so that health probes are answered.
        configure_logging("engine")
        master_key = MasterKey.load(Path(spec.master_key_file))
        self._model = spec.model
        self._drain_s = spec.drain_s
        self._stop_drain_s = spec.stop_drain_s
        self._stop_file = Path(spec.stop_file) if spec.stop_file is not None else None
        index = find_index()
        label = replica_label(spec.generation, index)
        self._journal: EngineJournal | None = None
        if spec.journal_dir is not None:
            folder = Path(spec.journal_dir) / quote(spec.model.name, safe="") / index
            self._journal = EngineJournal(folder)
        self._outlet = TokenOutlet(
            master_key.derive(CHANNEL_PURPOSE),
            label=(spec.model.name, label),
            submit=self._submit,
            abort=self._abort,
            blocks=BlockPublisher(lambda whole: self._engine.block_changes(whole=whole)),
            limits=OutletLimits(publish_every_s=spec.publish_every_s),
            status=self._status,
            cut=self._journal.cut if self._journal is not None else None,
        )
        prefix_key = master_key.derive(PREFIX_PURPOSE)
        started = time.monotonic()
        try:
            self._engine: ReplicaEngine = await asyncio.to_thread(self._load, spec, prefix_key)
        except Exception as error:
            # Whatever it is, it ends this replica, and its text may hold anything: only a reason is told.
            reason = reason_of(error, spec.model.source, spec.model.chat_template_file)
            logger.warning("the engine of %s can't start: %s", spec.model.name, reason)
            raise EngineStartFault(reason) from None
        logger.info("the engine of %s was ready after %.1f s", spec.model.name, time.monotonic() - started)
        self._created = int(time.time())
        self.metrics = EngineMetrics(spec.model.name, label, self._engine.stats)
        self._outlet.on_end = self.metrics.ended
        self._telling = ReplicaTelemetry(spec, label, self.metrics, self._outlet.may_scrape)
        await self._telling.start()
        self._heeding = asyncio.create_task(self._heed_notice(spec.notice_dir), name="notice")

    def _load(self, spec: ReplicaSpec, prefix_key: bytes) -> ReplicaEngine:
        return find_loader(spec.model.loader)(
            spec.model.source,
            spec.model.engine,
            deliver=self._deliver,
            prefix_key=prefix_key,
            models_dir=Path(spec.models_dir) if spec.models_dir else None,
        )

    async def attach(self, address: str) -> ModelCard:
        """Connect to a gateway, so that it gets this replica's statistics, and tell it what is served.

        Raises:
            ChannelError: the gateway doesn't answer or fails the challenge.
        """
        await self._outlet.link(address)
        engine, model = self._engine, self._model
        return ModelCard(
            name=model.name,
            source=model.source,
            max_model_len=engine.max_model_len,
            kv_tokens=engine.kv_tokens,
            vocab_size=engine.vocab_size,
            dtype=engine.dtype,
            fingerprint=engine.fingerprint,
            aliases=model.aliases,
            chat_template_file=model.chat_template_file,
            created=self._created,
        )

    def check_health(self) -> None:
        """Raise when the step loop gives no sign of life: Serve then replaces this replica.

        Having a `check_health` turns Serve's own watch of the loop off, so this must judge the engine itself.
        """
        age_s = self._engine.heartbeat_age_s()
        if age_s > MAX_HEARTBEAT_AGE_S:
            raise EngineDead(f"the step loop gave no sign of life for {age_s:.0f} s")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve asks for where the number of replicas is to be decided."""
        stats = self._engine.stats()
        return recorded(
            waiting=stats.waiting,
            batch_waiting=stats.batch_waiting,
            running=stats.running,
            batch_running=stats.batch_running,
            max_running=self._model.engine.max_num_seqs,
            kv_usage=stats.kv_usage,
            finished=sum(stats.finished.values()),
        )

    async def __del__(self) -> None:
        # Serve awaits this, as long as the deployment's grace allows; one whose load failed has no engine.
        engine = getattr(self, "_engine", None)
        if engine is not None:
            await self._drain()
            self._heeding.cancel()
            await self._outlet.close()
            await self._telling.close()
            await asyncio.to_thread(engine.shutdown)
        journal = getattr(self, "_journal", None)
        if journal is not None:
            journal.close()

    async def _drain(self) -> None:
        """Let streams end; what is not done in time the gateways tell the clients of."""
        draining = asyncio.create_task(self._outlet.drain())
        end = time.monotonic() + self._drain_s
        is_stopping = False
        while not draining.done() and (left_s := end - time.monotonic()) > 0:
            await asyncio.wait([draining], timeout=min(left_s, STOP_LOOK_S))
            if not is_stopping and self._stop_file is not None and self._stop_file.exists():
                is_stopping = True
                end = min(end, time.monotonic() + self._stop_drain_s)
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)

    async def _heed_notice(self, folder: str | None) -> None:
        """Once the node is to be taken away let others go first, and end what is left before it goes."""
        if folder is None:
            return
        notice = notice_file(Path(folder), _node_id())
        while (ends_at := read_notice(notice)) is None:
            await asyncio.sleep(NOTICE_LOOK_S)
        logger.warning("the node goes away; streams have %.0f s to end", ends_at - time.monotonic())
        self._outlet.leave()
        # It may be told again, that there is less time, or more.
        while (ends_at := read_notice(notice) or ends_at) > time.monotonic():
            await asyncio.sleep(NOTICE_LOOK_S)
        await self._outlet.close()

    def _submit(self, request: EngineRequest) -> None:
        """Give a gateway's request to the engine. Raises EngineError: it doesn't take it."""
        journal = self._journal
        if journal is not None:
            journal.open(request.request_id, request.params.n)
        try:
            self._engine.add(request)
        except EngineError:
            if journal is not None:
                journal.forget(request.request_id)
            raise

    def _deliver(self, deltas: Sequence[SequenceDelta]) -> None:
        # Before they leave: what anybody is billed for stands in the journal.
        if self._journal is not None:
            self._journal.note(deltas)
        self._outlet.deliver(deltas)

    def _abort(self, request_id: str, index: int | None) -> None:
        self._engine.abort(request_id, index)

    def _status(self) -> Status:
        port = self._telling.metrics_port
        return Status(self._engine.heartbeat_age_s(), self._engine.stats(), metrics_port=port)


def _node_id() -> str:
    # Without a cluster nothing asks for it.
    import ray

    return str(ray.get_runtime_context().get_node_id())
