"""Bodies of the admin API, and the answers that `/openapi.json` tells readers of."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from footplate.platform.http.schemas import Body
from footplate.platform.model_registry import ModelState
from footplate.platform.settings import ModelSettings
from footplate.tenancy.admin.keys import DEFAULT_OVERLAP_S
from footplate.tenancy.api_keys import Role


def _aware(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError("must carry a time zone, such as 2027-01-01T00:00:00Z")
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ValueError("must lie within the years 1 to 9999 in UTC") from None


_Text = Annotated[str, Field(max_length=256)]
_Labels = Annotated[dict[Annotated[str, Field(max_length=64)], _Text], Field(max_length=64)]
_Time = Annotated[datetime, AfterValidator(_aware)]
_Amount = Annotated[int, Field(ge=0)]
_Money = Annotated[str, Field(max_length=32, examples=["250.00"])]


class TenantBody(Body):
    """`POST /tenants`."""

    name: _Text
    cost_center: _Text = ""
    share_group: _Text | None = None
    timezone: _Text | None = None
    labels: _Labels = Field(default_factory=dict)
    captures_content: bool = False


class TenantChangeBody(Body):
    """`PATCH /tenants/{id}`: what is left out stays; null takes `share_group` or `timezone` away."""

    name: _Text | None = None
    cost_center: _Text | None = None
    share_group: _Text | None = None
    timezone: _Text | None = None
    labels: _Labels | None = None
    captures_content: bool | None = None


class KeyBody(Body):
    """`POST /tenants/{id}/keys`."""

    name: _Text = ""
    role: Role = Role.MEMBER
    expires_at: _Time | None = None
    labels: _Labels = Field(default_factory=dict)


class RotationBody(Body):
    """`POST /keys/{id}/rotate`: for `overlap_s` both keys work."""

    overlap_s: int = DEFAULT_OVERLAP_S
    expires_at: _Time | None = None


class ModelBody(ModelSettings, Body):
    """`POST /models`: as an entry of the configuration's `models`."""


class EmptyBody(Body):
    """A POST that takes nothing: no body, or an empty object."""


class _Amounts(Body):
    requests_per_minute: _Amount | None = None
    tokens_per_minute: _Amount | None = None
    tokens_per_day: _Amount | None = None
    max_concurrent_requests: _Amount | None = None
    max_context_tokens: _Amount | None = None
    mode: Literal["enforce", "shadow"] | None = None


class QuotaBody(_Amounts):
    """`PUT …/quota`: the whole quota; null or left out is unlimited, 0 refuses all."""

    allowed_models: Annotated[list[_Text], Field(fail_fast=True)] | None = None
    per_model: dict[_Text, _Amounts] | None = None
    priority: int | None = None
    weight: float | None = None
    monthly_budget: _Money | None = None
    monthly_soft_budget: _Money | None = None
    cached_token_weight: float | None = None


class Answer(BaseModel):
    """What an answer holds; these only describe."""

    model_config = ConfigDict(extra="forbid")


class TenantAnswer(Answer):
    """A tenant's own admin is not shown `share_group`."""

    id: str
    object: Literal["tenant"]
    name: str
    cost_center: str
    share_group: str | None = None
    timezone: str | None
    labels: dict[str, str]
    captures_content: bool
    state: Literal["active", "suspended"]
    created_at: str | None


class KeyAnswer(Answer):
    id: str
    object: Literal["api_key"]
    tenant_id: str
    name: str
    role: Role
    labels: dict[str, str]
    state: Literal["live", "expired", "revoked"]
    created_at: str | None
    expires_at: str | None
    revoked_at: str | None
    last_used_at: str | None
    replaces: str | None


class NewKeyAnswer(KeyAnswer):
    """`key` is the text, here and nowhere else; null when a repeated request is answered."""

    key: str | None


class RotatedKeyAnswer(NewKeyAnswer):
    replaced: KeyAnswer


class QuotaAnswer(Answer):
    """`source`: `own`, `default` where the default of the settings holds, `none`."""

    object: Literal["quota"]
    source: Literal["own", "default", "none"]
    requests_per_minute: int | None
    tokens_per_minute: int | None
    tokens_per_day: int | None
    max_concurrent_requests: int | None
    max_context_tokens: int | None
    allowed_models: list[str] | None
    per_model: dict[str, dict[str, Any]] | None
    priority: int | None
    weight: float | None
    monthly_budget: str | None
    monthly_soft_budget: str | None
    cached_token_weight: float | None
    mode: Literal["enforce", "shadow"]


class ModelAnswer(Answer):
    """`origin`: `file`, the configuration, or `api`. Only a replica knows `created` and what follows it."""

    id: str
    object: Literal["model"]
    name: str
    aliases: list[str]
    source: str | None
    chat_template: str | None
    engine: dict[str, Any] | None
    replicas: dict[str, Any] | None
    origin: Literal["file", "api"]
    state: ModelState
    reason: str | None
    retry_at: str | None
    generation: int
    serving_generation: int | None
    num_replicas: int
    changed_by: str | None
    changed_at: str | None
    created: int | None
    max_model_len: int | None
    dtype: str | None


class ActorAnswer(Answer):
    key_id: str
    tenant_id: str
    role: Role


class TargetAnswer(Answer):
    kind: Literal["tenant", "key", "prices", "period", "export", "model", "capture"]
    id: str


class AuditAnswer(Answer):
    id: str
    object: Literal["audit_record"]
    at: str
    action: str
    outcome: Literal["done", "refused"]
    code: str | None
    actor: ActorAnswer
    source: str
    request_id: str
    target: TargetAnswer | None
    tenant_id: str | None
    before: dict[str, Any] | None
    after: dict[str, Any] | None


class HealthAnswer(Answer):
    status: Literal["ready", "not_ready"]
    dependencies: dict[str, dict[str, Any]]


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """The one shape of all errors."""

    error: ErrorDetail
