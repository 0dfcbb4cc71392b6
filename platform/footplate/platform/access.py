"""Who calls: the first step of each request."""

from __future__ import annotations

from collections.abc import Mapping

from footplate.platform.errors import AuthenticationFailed, PermissionDenied
from footplate.platform.ports import Authenticator, Principal
from footplate.tenancy.access import Action, roles_with

# An admin key may not call models: what it can reach is administration.
INFERENCE_ROLES = frozenset(role.value for role in roles_with(Action.USE_MODELS))
SCRAPE_ROLES = frozenset(role.value for role in roles_with(Action.READ_METRICS))
ME_ROLES = frozenset(role.value for role in roles_with(Action.SEE_ONESELF))
_MAX_KEY_CHARACTERS = 512


async def authenticate(
    headers: Mapping[str, str], authenticator: Authenticator, roles: frozenset[str] | None = INFERENCE_ROLES
) -> Principal:
    """The caller of a request, by `Authorization: Bearer KEY` or `x-api-key`. `roles` None takes any.

    Raises:
        AuthenticationFailed: no key, or not a live one.
        PermissionDenied: a live key of another role.
    """
    key = _key(headers)
    principal = await authenticator.authenticate(key) if key else None
    if principal is None:
        raise AuthenticationFailed(
            "Incorrect API key provided." if key else "Send an API key: 'Authorization: Bearer KEY'."
        )
    if roles is not None and principal.role not in roles:
        raise PermissionDenied("This key's role may not call this URL.")
    return principal


async def may_scrape(authenticator: Authenticator, key: str) -> bool:
    """Whether a key's text may read metrics."""
    if not 0 < len(key) <= _MAX_KEY_CHARACTERS or not key.isascii():
        return False
    principal = await authenticator.authenticate(key)
    return principal is not None and principal.role in SCRAPE_ROLES


def _key(headers: Mapping[str, str]) -> str | None:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    key = value.strip() if scheme.lower() == "bearer" else ""
    key = key or headers.get("x-api-key", "").strip()
    return key if 0 < len(key) <= _MAX_KEY_CHARACTERS and key.isascii() else None
