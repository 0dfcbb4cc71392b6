"""What a limit is: how much of what, over which window, for whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from urllib.parse import quote

from footplate.tenancy.quotas import LimitMode, Quota


class LimitKind(StrEnum):
    """What is limited; the values are the names in a quota."""

    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    TOKENS_PER_DAY = "tokens_per_day"
    MAX_CONCURRENT_REQUESTS = "max_concurrent_requests"


TOKEN_KINDS = frozenset({LimitKind.TOKENS_PER_MINUTE, LimitKind.TOKENS_PER_DAY})


@dataclass(frozen=True, slots=True)
class Window:
    """A sliding window in whole buckets: the current one, and the `num_buckets` before it.

    So every span of `num_buckets * bucket_ms` lies inside some window, wherever it starts, and what was taken
    comes back at most one bucket after such a span has passed.
    """

    bucket_ms: int
    num_buckets: int

    def bucket_at(self, now_ms: int) -> int:
        """The index of the bucket of a moment."""
        return now_ms // self.bucket_ms

    def end_ms(self, bucket: int) -> int:
        """The first moment at which a bucket is in no window any more."""
        return (bucket + self.num_buckets + 1) * self.bucket_ms

    def time_left_ms(self, bucket: int, now_ms: int) -> int:
        """Until a bucket has left; while the clock is behind it, no longer than the window is."""
        return min(self.end_ms(bucket) - now_ms, (self.num_buckets + 1) * self.bucket_ms)


MINUTE = Window(bucket_ms=1_000, num_buckets=60)
DAY = Window(bucket_ms=300_000, num_buckets=288)

# A kind that is missing here is no window: concurrent requests are held, not used up.
WINDOWS: Mapping[LimitKind, Window] = MappingProxyType(
    {
        LimitKind.REQUESTS_PER_MINUTE: MINUTE,
        LimitKind.TOKENS_PER_MINUTE: MINUTE,
        LimitKind.TOKENS_PER_DAY: DAY,
    }
)


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose use is counted together: a tenant's or one of its keys', over all models or for one."""

    tenant_id: str
    key_id: str | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        if not self.tenant_id:
            raise ValueError("a scope needs a tenant id")

    @property
    def name(self) -> str:
        """Its name within the tenant. Quoted, so that no two scopes share a name, whatever their ids hold."""
        who = "tenant" if self.key_id is None else f"key={quote(self.key_id, safe='')}"
        return who if self.model is None else f"{who}:model={quote(self.model, safe='')}"


@dataclass(frozen=True, slots=True)
class Limit:
    """At most `max_amount` of a kind in a scope; 0 refuses all."""

    scope: Scope
    kind: LimitKind
    max_amount: int
    mode: LimitMode = LimitMode.ENFORCE

    def __post_init__(self) -> None:
        if self.max_amount < 0:
            raise ValueError(f"{self.kind} is {self.max_amount}; a limit is 0 or more, or left out")

    @property
    def is_enforced(self) -> bool:
        """Whether it may refuse."""
        return self.mode is LimitMode.ENFORCE


def limits_for(
    tenant_id: str, key_id: str, model: str, *, tenant_quota: Quota, key_quota: Quota | None = None
) -> tuple[Limit, ...]:
    """Every limit that one request meets: the tenant's, the key's, and those either has for the model."""
    quotas = [(Scope(tenant_id), Scope(tenant_id, model=model), tenant_quota)]
    if key_quota is not None:
        quotas.append((Scope(tenant_id, key_id), Scope(tenant_id, key_id, model), key_quota))
    found: list[Limit] = []
    for all_models, one_model, quota in quotas:
        found += _limits_of(all_models, quota)
        if model in quota.per_model:
            found += _limits_of(one_model, quota.per_model[model])
    return tuple(found)


def _limits_of(scope: Scope, quota: Quota) -> Iterator[Limit]:
    for kind in LimitKind:
        max_amount: int | None = getattr(quota, kind.value)
        if max_amount is not None:
            yield Limit(scope, kind, max_amount, quota.mode)
