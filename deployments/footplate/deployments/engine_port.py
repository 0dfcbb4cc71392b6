"""What a replica needs from an engine, as a protocol, and how it comes by one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, cast

from footplate.engine.config import EngineConfig
from footplate.engine.errors import LoadError
from footplate.engine.kv.block_log import BlockChanges
from footplate.engine.types import EngineRequest, EngineStats, SequenceDelta

DeliverTokens = Callable[[Sequence[SequenceDelta]], None]
REAL_ENGINE = "footplate.engine.async_engine:AsyncEngine.load"


class ReplicaEngine(Protocol):
    """An engine with a step loop on a thread of its own. Every method may be called from any thread."""

    max_model_len: int
    kv_tokens: int
    vocab_size: int
    dtype: str
    fingerprint: str

    def add(self, request: EngineRequest) -> None:
        """Queue a request, or refuse it at once with an `EngineError`."""
        ...

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request or one choice of it. Idempotent; unknown ids are ignored."""
        ...

    def stats(self) -> EngineStats:
        """A snapshot; cheap."""
        ...

    def block_changes(self, *, whole: bool = False) -> BlockChanges:
        """What came into the prefix cache and went since the call before; `whole`: all that is there."""
        ...

    def heartbeat_age_s(self) -> float:
        """Seconds since the step loop last gave a sign of life."""
        ...

    def shutdown(self) -> None:
        """End the step loop; what still runs ends with an error."""
        ...


class EngineLoader(Protocol):
    """Makes an engine; takes seconds. `deliver` is then called once a step from the engine's thread."""

    def __call__(
        self,
        source: str,
        config: EngineConfig,
        *,
        deliver: DeliverTokens,
        prefix_key: bytes,
        models_dir: Path | None,
    ) -> ReplicaEngine: ...


def find_loader(name: str = REAL_ENGINE) -> EngineLoader:
    """The loader at `module:attribute.path`.

    Raises:
        LoadError: there is no such module or attribute.
    """
    module_name, _, path = name.partition(":")
    try:
        found: object = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise LoadError(f"no engine loader at {name!r}: {error}") from error
    return cast(EngineLoader, found)
