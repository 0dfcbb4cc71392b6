"""The gateway's ports: what it needs from engines and from tenancy, stated as protocols.

Adapters live in `deployments` (Ray, channel) and `tenancy` (PostgreSQL); tests bring their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from footplate.engine.types import EngineRequest, EngineStats, ModelCard, SequenceDelta
from footplate.tenancy.limiter.decisions import LimitState
from footplate.tenancy.quotas import UNLIMITED, Quota


@dataclass(frozen=True, slots=True)
class EngineBegin:
    """How an engine began a request, by its own clocks: from its coming to its place in the batch, and from
    there to its first token.
    """

    arrived_unix_ns: int
    queue_s: float
    prefill_s: float


@dataclass(slots=True)
class Placement:
    """One replica that was asked for a request. Times are monotonic seconds of this process.

    `outcome`: answered, refused, lost (the replica died) or moved (it died, and another one was asked).
    """

    replica: str
    asked_at: float
    reason: str = ""
    outcome: str = "answered"
    ended_at: float | None = None
    begun: EngineBegin | None = None


@dataclass(slots=True)
class Journey:
    """One prompt's way to the engines: its client writes it down, its request reads it.

    `trace`: `TraceContext.to_wire`, for engines; empty: none. `may_wait`: where no replica takes it now, one
    that comes is waited for.
    """

    model: str
    trace: bytes = b""
    may_wait: bool = True
    placements: list[Placement] = field(default_factory=list)


class Generation(Protocol):
    """One running request. Its owner must call `close`, which aborts whatever still runs."""

    @property
    def engine(self) -> str:
        """The index, among its model's engines, of the one that accepted the request."""
        ...

    async def next(self) -> Sequence[SequenceDelta]:
        """Wait for tokens, then give everything that has come since: the more lag, the larger the batch.

        Empty when all choices have ended. A choice that failed ends with FinishReason.ERROR.

        Raises:
            EngineDead: the replica died or fell silent before the request ended.
        """
        ...

    def stop(self, index: int, num_used: int) -> None:
        """End one choice at the engine (a stop string was seen); no further deltas of it are given.

        `num_used`: how many of its tokens belong to the answer; what the engine has made beyond is discarded.
        """
        ...

    async def cancel(self) -> Sequence[SequenceDelta] | None:
        """Abort what still runs; all that was made until the engine heard of it and `next` has not given.

        None: nobody can say how much that is, since the engine is gone or gives no answer in a bounded time.
        """
        ...

    async def close(self) -> None:
        """Abort what still runs and give everything back. Idempotent, safe at any time."""
        ...


@dataclass(frozen=True, slots=True)
class ModelNames:
    """What clients may call a model."""

    name: str
    aliases: tuple[str, ...] = ()


class InferenceClient(Protocol):
    """The gateway's way to the engines."""

    async def submit(self, model: str, request: EngineRequest, journey: Journey | None = None) -> Generation:
        """Hand a request to a replica of `model`; returns once an engine has accepted it.

        Who is asked, and what became of it until the generation is closed, is added to `journey`.

        Raises:
            InvalidRequest, RequestTooLarge: the engine refused it for good.
            EngineOverloaded: no replica can take it now.
            EngineDead: no replica is alive.
        """
        ...

    def models(self) -> Mapping[str, ModelCard]:
        """The served models by name (no aliases): those of which a replica has answered."""
        ...

    def starting(self) -> Collection[ModelNames]:
        """The models that are to be served and of which no replica has answered yet."""
        ...

    def stats(self) -> Mapping[tuple[str, str], EngineStats]:
        """The last statistics of each (model, engine index), pushed by the engines."""
        ...


@dataclass(frozen=True, slots=True)
class Principal:
    """Who a key stands for, and the quotas that its requests meet, so that no step asks a second time.

    `cache_scope` is derived from the tenant on the server. `key_quota` None: no limits of the key's own.
    """

    key_id: str
    tenant_id: str
    role: str
    cache_scope: bytes
    tenant_quota: Quota = UNLIMITED
    key_quota: Quota | None = None
    # Whom its use is charged to, as it stands on usage events; labels in the order of their names.
    cost_center: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    # Whether its tenant has opted in to having prompts and answers kept; see `capture`.
    captures_content: bool = False


class Authenticator(Protocol):
    """Resolves API keys."""

    async def authenticate(self, key: str) -> Principal | None:
        """The principal of a live key, or None. Takes the same time for a wrong secret as for a right one."""
        ...


class KeyFinder(Protocol):
    """Looks keys up for work that was accepted under them and runs later."""

    async def find(self, key_id: str) -> Principal | None:
        """The principal of a live key by its public id, as fresh as for a request, or None."""
        ...


class UseReader(Protocol):
    """Says how much of its limits a caller has used."""

    async def use(self, principal: Principal) -> Sequence[LimitState]:
        """Every limit that the principal's requests meet, whatever their model. Nothing is taken.

        Raises:
            LimiterUnavailable: the counters can't be asked.
        """
        ...
