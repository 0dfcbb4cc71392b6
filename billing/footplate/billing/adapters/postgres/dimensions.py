"""The numbers under which dimensions are kept, remembered once they are known."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import msgspec
from sqlalchemy import Engine

from footplate.billing.adapters.postgres.books import committing
from footplate.billing.adapters.postgres.bulk import BulkInsert
from footplate.billing.adapters.postgres.tables import SCHEMA
from footplate.billing.usage import UsageEvent

MAX_REMEMBERED = 100_000


@dataclass(frozen=True, slots=True)
class Dimension:
    """Whom and what usage belongs to."""

    tenant_id: str
    key_id: str
    requested_model: str
    served_model: str
    cost_center: str
    labels: tuple[tuple[str, str], ...]
    is_batch: bool

    @property
    def digest(self) -> bytes:
        """The same for the same combination, in every process and version."""
        fields = [self.tenant_id, self.key_id, self.requested_model, self.served_model, self.cost_center]
        packed = msgspec.msgpack.encode([*fields, [list(pair) for pair in self.labels], self.is_batch])
        return blake2b(packed, digest_size=16).digest()


def dimension_of(event: UsageEvent) -> Dimension:
    """The dimension of an event, labels as they were at its admission."""
    skeleton = event.skeleton
    return Dimension(
        skeleton.tenant_id,
        skeleton.key_id,
        skeleton.requested_model,
        event.served_model,
        skeleton.cost_center,
        skeleton.labels,
        skeleton.batch_id is not None,
    )


_TEXTS = ("tenant_id", "key_id", "requested_model", "served_model", "cost_center")
_INSERT = BulkInsert(
    "dimensions",
    {"digest": "bytea", **dict.fromkeys(_TEXTS, "text"), "labels": "jsonb", "is_batch": "bool"},
    tail="on conflict (digest) do nothing",
)
_FIND = f"select digest, id from {SCHEMA}.dimensions where digest = any(%s)"


class DimensionIds:
    """Finds or makes rows; rows are never changed, so what was found once is right for ever."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids: dict[Dimension, int] = {}

    def find(self, dimensions: Iterable[Dimension]) -> dict[Dimension, int]:
        """The numbers of dimensions. Those that are new are made in a transaction of their own."""
        wanted = set(dimensions)
        known = self._ids
        if missing := wanted - known.keys():
            if len(known) + len(missing) > MAX_REMEMBERED:
                known = self._ids = {}
                missing = wanted
            known.update(self._make(missing))
        return {dimension: known[dimension] for dimension in wanted}

    def _make(self, missing: Iterable[Dimension]) -> dict[Dimension, int]:
        digests = {dimension.digest: dimension for dimension in missing}
        rows = [
            (
                digest,
                *[getattr(digests[digest], name) for name in _TEXTS],
                json.dumps(dict(digests[digest].labels), ensure_ascii=False),
                digests[digest].is_batch,
            )
            for digest in sorted(digests)
        ]
        with committing(self._engine) as driver:
            _INSERT.run(driver, rows)
            found = driver.execute(_FIND, (list(digests),)).fetchall()
        return {digests[bytes(digest)]: number for digest, number in found}
