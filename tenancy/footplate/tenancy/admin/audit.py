"""Who did what to whom, from where: the records that every change leaves, refused ones too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from footplate.tenancy.access import Action
from footplate.tenancy.api_keys import Role


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, by which key, in which request, from which address."""

    key_id: str
    tenant_id: str
    role: Role
    source: str = ""
    request_id: str = ""


class TargetKind(StrEnum):
    """What a change is made to."""

    TENANT = "tenant"
    KEY = "key"
    PRICES = "prices"
    PERIOD = "period"
    EXPORT = "export"
    MODEL = "model"
    CAPTURE = "capture"


class Outcome(StrEnum):
    """Whether it was done."""

    DONE = "done"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Target:
    """What was changed, and the tenant it belongs to, as far as they are known."""

    kind: TargetKind
    id: str
    tenant_id: str | None = None


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One change, or one that was refused. `before` and `after` never hold a secret.

    `seq` and `at` are the store's. Records are numbered in the order in which their changes took hold.
    """

    action: Action
    outcome: Outcome
    caller: Caller
    target: Target | None = None
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None
    # The error's code, of a refused change.
    code: str | None = None
    seq: int = 0
    at: datetime | None = None

    def fields(self) -> dict[str, Any]:
        """As it is shown."""
        target = self.target
        at = None if self.at is None else self.at.astimezone(UTC).isoformat(timespec="milliseconds")
        return {
            "id": str(self.seq),
            "object": "audit_record",
            "at": None if at is None else at.replace("+00:00", "Z"),
            "action": self.action.value,
            "outcome": self.outcome.value,
            "code": self.code,
            "actor": {
                "key_id": self.caller.key_id,
                "tenant_id": self.caller.tenant_id,
                "role": self.caller.role.value,
            },
            "source": self.caller.source,
            "request_id": self.caller.request_id,
            "target": None if target is None else {"kind": target.kind.value, "id": target.id},
            "tenant_id": None if target is None else target.tenant_id,
            "before": None if self.before is None else dict(self.before),
            "after": None if self.after is None else dict(self.after),
        }
