"""The platform's app with its real adapters: what `GatewaySpec.app_builder` names by default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from footplate.deployments.specs import GatewaySpec
from footplate.platform.ports import InferenceClient, Principal
from footplate.platform.settings import load_settings
from footplate.tenancy.authenticator import CachingAuthenticator
from footplate.tenancy.secrets import MasterKey


class TenancyAuthenticator:
    """Tenancy's key holders as the platform's principals; see `ports.Authenticator`."""

    def __init__(self, keys: CachingAuthenticator) -> None:
        self._keys = keys

    async def authenticate(self, key: str) -> Principal | None:
        """The principal of a live key, or None."""
        holder = await self._keys.authenticate(key)
        if holder is None:
            return None
        return Principal(holder.key_id, holder.tenant_id, str(holder.role), holder.cache_scope)


async def build(spec: GatewaySpec, client: InferenceClient) -> Any:
    """The app of one gateway replica."""
    # The drivers are only loaded in the process that talks to the database.
    from footplate.platform.app import create_app
    from footplate.tenancy.adapters.postgres.store import PostgresKeyStore, connect

    settings = load_settings(Path(spec.config_file) if spec.config_file else None)
    store = PostgresKeyStore(connect(spec.database_url))
    keys = CachingAuthenticator(store, MasterKey.load(Path(spec.master_key_file)))
    return create_app(settings, client, TenancyAuthenticator(keys))
