"""Who may do what: one table, deny by default. Pure.

A role that does not stand in an action's row may not do it. Reach says on whose behalf: OWN is the tenant
that the key belongs to, and what lies beyond it does not exist for the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from types import MappingProxyType

from footplate.tenancy.api_keys import Role
from footplate.tenancy.errors import AccessDenied, NotFound


class Reach(IntEnum):
    """Whose things an action may touch."""

    NONE = 0
    OWN = 1
    ALL = 2


class Action(StrEnum):
    """All that can be asked of the platform. The values stand in audit records."""

    USE_MODELS = "models.use"
    SEE_ONESELF = "me.read"
    READ_METRICS = "metrics.read"
    CREATE_TENANT = "tenant.create"
    READ_TENANT = "tenant.read"
    UPDATE_TENANT = "tenant.update"
    SUSPEND_TENANT = "tenant.suspend"
    RESUME_TENANT = "tenant.resume"
    CREATE_KEY = "key.create"
    READ_KEY = "key.read"
    ROTATE_KEY = "key.rotate"
    REVOKE_KEY = "key.revoke"
    READ_QUOTA = "quota.read"
    SET_TENANT_QUOTA = "quota.set"
    READ_KEY_QUOTA = "key_quota.read"
    SET_KEY_QUOTA = "key_quota.set"
    READ_MODELS = "models.read"
    ADD_MODEL = "model.add"
    RELOAD_MODEL = "model.reload"
    REMOVE_MODEL = "model.remove"
    READ_ROUTES = "routes.read"
    READ_AUDIT = "audit.read"
    READ_HEALTH = "health.read"
    READ_USAGE = "usage.read"
    READ_PRICES = "prices.read"
    IMPORT_PRICES = "prices.import"
    READ_PERIODS = "periods.read"
    CLOSE_PERIOD = "period.close"
    READ_STATEMENT = "statement.read"
    READ_RECONCILIATION = "reconciliation.read"
    CREATE_EXPORT = "export.create"
    READ_EXPORT = "export.read"
    LIST_CAPTURES = "captures.list"
    READ_CAPTURE = "capture.read"
    ERASE_CAPTURES = "captures.erase"


_ADMIN, _FINANCE, _AUDITOR = Role.PLATFORM_ADMIN, Role.FINANCE, Role.AUDITOR
_TENANT_ADMIN, _MEMBER, _SCRAPE = Role.TENANT_ADMIN, Role.MEMBER, Role.SCRAPE
_OWN, _ALL = Reach.OWN, Reach.ALL

MATRIX: Mapping[Action, Mapping[Role, Reach]] = MappingProxyType(
    {
        Action.USE_MODELS: {_MEMBER: _OWN},
        Action.SEE_ONESELF: {
            _ADMIN: _OWN,
            _FINANCE: _OWN,
            _AUDITOR: _OWN,
            _TENANT_ADMIN: _OWN,
            _MEMBER: _OWN,
        },
        Action.READ_METRICS: {_ADMIN: _ALL, _SCRAPE: _ALL},
        Action.CREATE_TENANT: {_ADMIN: _ALL},
        Action.READ_TENANT: {_ADMIN: _ALL, _FINANCE: _ALL, _AUDITOR: _ALL, _TENANT_ADMIN: _OWN},
        Action.UPDATE_TENANT: {_ADMIN: _ALL},
        Action.SUSPEND_TENANT: {_ADMIN: _ALL},
        Action.RESUME_TENANT: {_ADMIN: _ALL},
        Action.CREATE_KEY: {_ADMIN: _ALL, _TENANT_ADMIN: _OWN},
        Action.READ_KEY: {_ADMIN: _ALL, _AUDITOR: _ALL, _TENANT_ADMIN: _OWN},
        Action.ROTATE_KEY: {_ADMIN: _ALL, _TENANT_ADMIN: _OWN},
        Action.REVOKE_KEY: {_ADMIN: _ALL, _TENANT_ADMIN: _OWN},
        Action.READ_QUOTA: {_ADMIN: _ALL, _FINANCE: _ALL, _AUDITOR: _ALL, _TENANT_ADMIN: _OWN},
        Action.SET_TENANT_QUOTA: {_ADMIN: _ALL},
        Action.READ_KEY_QUOTA: {_ADMIN: _ALL, _FINANCE: _ALL, _AUDITOR: _ALL, _TENANT_ADMIN: _OWN},
        Action.SET_KEY_QUOTA: {_ADMIN: _ALL, _TENANT_ADMIN: _OWN},
        Action.READ_MODELS: {_ADMIN: _ALL, _AUDITOR: _ALL},
        # What routes saved is money, so finance sees them too.
        Action.READ_ROUTES: {_ADMIN: _ALL, _FINANCE: _ALL, _AUDITOR: _ALL},
        Action.ADD_MODEL: {_ADMIN: _ALL},
        Action.RELOAD_MODEL: {_ADMIN: _ALL},
        Action.REMOVE_MODEL: {_ADMIN: _ALL},
        Action.READ_AUDIT: {_ADMIN: _ALL, _AUDITOR: _ALL},
        Action.READ_HEALTH: {_ADMIN: _ALL, _AUDITOR: _ALL},
        Action.READ_USAGE: {_ADMIN: _ALL, _FINANCE: _ALL, _AUDITOR: _ALL, _TENANT_ADMIN: _OWN},
        Action.READ_PRICES: {_ADMIN: _ALL, _FINANCE: _ALL, _AUDITOR: _ALL},
        Action.IMPORT_PRICES: {_ADMIN: _ALL},
        Action.READ_PERIODS: {_ADMIN: _ALL, _FINANCE: _ALL, _AUDITOR: _ALL},
        Action.CLOSE_PERIOD: {_ADMIN: _ALL, _FINANCE: _ALL},
        Action.READ_STATEMENT: {_ADMIN: _ALL, _FINANCE: _ALL, _AUDITOR: _ALL, _TENANT_ADMIN: _OWN},
        Action.READ_RECONCILIATION: {_ADMIN: _ALL, _FINANCE: _ALL, _AUDITOR: _ALL},
        Action.CREATE_EXPORT: {_ADMIN: _ALL, _FINANCE: _ALL, _TENANT_ADMIN: _OWN},
        Action.READ_EXPORT: {_ADMIN: _ALL, _FINANCE: _ALL, _AUDITOR: _ALL, _TENANT_ADMIN: _OWN},
        Action.LIST_CAPTURES: {_ADMIN: _ALL},
        Action.READ_CAPTURE: {_ADMIN: _ALL},
        Action.ERASE_CAPTURES: {_ADMIN: _ALL},
    }
)

# Whose keys a role may make, rotate, revoke and limit. A tenant's admin must not turn a key of the platform's
# that lies in its tenant into one that it holds.
GRANTS: Mapping[Role, frozenset[Role]] = MappingProxyType(
    {_ADMIN: frozenset(Role), _TENANT_ADMIN: frozenset({_TENANT_ADMIN, _MEMBER})}
)

# Fields of a key's quota that go beyond the key's own share of its tenant: they change how the tenant stands
# beside others.
PLATFORM_QUOTA_FIELDS = frozenset({"priority", "weight", "cached_token_weight"})


def reach_of(role: Role, action: Action) -> Reach:
    """How far a role reaches with an action."""
    return MATRIX[action].get(role, Reach.NONE)


def roles_with(action: Action) -> frozenset[Role]:
    """The roles that may do it at all."""
    return frozenset(MATRIX[action])


def require_role(role: Role, action: Action) -> None:
    """Raises AccessDenied for a role that may not do this to anybody."""
    if reach_of(role, action) is Reach.NONE:
        raise AccessDenied(f"a key of the role {role} may not do this ({action})")


def require_reach(role: Role, own_tenant_id: str, action: Action, tenant_id: str) -> None:
    """Whether a role may do this to a tenant or to something of a tenant.

    Raises:
        AccessDenied: the role may not do it to anybody.
        NotFound: only to its own tenant's; so the caller does not learn what else there is.
    """
    require_role(role, action)
    if reach_of(role, action) is Reach.OWN and tenant_id != own_tenant_id:
        raise NotFound("there is no such tenant or key")


def require_grant(role: Role, other: Role) -> None:
    """Whether a role may make or change keys of another.

    Raises:
        AccessDenied: it may not.
    """
    grants = GRANTS.get(role, frozenset())
    if other not in grants:
        may = f"; it may for {', '.join(sorted(grants))}" if grants else ""
        raise AccessDenied(f"a key of the role {role} may not make or change keys of the role {other}{may}")
