"""Endpoints of `/admin/v1` for models: what is served, and what adds, changes, reloads and removes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.responses import JSONResponse, Response

from footplate.engine.types import ModelCard
from footplate.platform.http.admin.exchange import (
    PAGE_PARAMETERS,
    PREFIX,
    AdminExchange,
    AdminRoute,
    listed_by_name,
)
from footplate.platform.http.admin.schemas import EmptyBody, ModelAnswer, ModelBody
from footplate.platform.model_desk import ModelDesk
from footplate.platform.model_registry import (
    NO_SUCH_MODEL,
    Decide,
    ModelState,
    RegistryChange,
    SeenModel,
    WantedModel,
    served_models,
    shown_settings,
)
from footplate.platform.settings import ModelSettings
from footplate.tenancy.access import Action
from footplate.tenancy.admin.audit import AuditRecord, Outcome, Target, TargetKind
from footplate.tenancy.admin.store import Writer
from footplate.tenancy.errors import Conflict, InvalidValue, NotFound
from footplate.tenancy.tenants import refuse_keys


async def list_models(exchange: AdminExchange) -> Response:
    """All models, those that don't serve too, with their state."""
    page = exchange.page()
    return listed_by_name(await _entries(exchange), page)


async def show_model(exchange: AdminExchange) -> Response:
    """One model by its name."""
    name = _name(exchange)
    for entry in await _entries(exchange):
        if entry["id"] == name:
            return JSONResponse(entry)
    raise NotFound(NO_SUCH_MODEL)


async def add_model(exchange: AdminExchange) -> Response:
    """Serve a model, or another version of one. The answer comes once it is checked; it then starts."""
    desk = _desk(exchange)
    assert isinstance(exchange.body, ModelBody)
    model = ModelSettings.model_validate(exchange.body.model_dump())
    _check_texts(model)
    decide = await desk.putting(model, exchange.caller.key_id, exchange.desk.billing)
    return await _change(exchange, desk, decide)


async def reload_model(exchange: AdminExchange) -> Response:
    """Start a model anew from its files; the replicas that serve it go once the new ones can."""
    desk = _desk(exchange)
    return await _change(exchange, desk, desk.reloading(_name(exchange), exchange.caller.key_id))


async def remove_model(exchange: AdminExchange) -> Response:
    """Serve a model no longer: it is 404 at once, and its open answers end by themselves."""
    desk = _desk(exchange)
    return await _change(exchange, desk, desk.removing(_name(exchange), exchange.caller.key_id))


def model_routes() -> tuple[AdminRoute, ...]:
    """The table of these endpoints. A model's name may hold slashes."""
    every, one, a = f"{PREFIX}/models", f"{PREFIX}/models/{{model_name:path}}", Action
    return (
        AdminRoute(
            "GET", every, a.READ_MODELS, list_models, ModelAnswer, None, PAGE_PARAMETERS, is_list=True
        ),
        AdminRoute("POST", every, a.ADD_MODEL, add_model, ModelAnswer, ModelBody),
        AdminRoute("POST", f"{one}/reload", a.RELOAD_MODEL, reload_model, ModelAnswer, EmptyBody),
        AdminRoute("GET", one, a.READ_MODELS, show_model, ModelAnswer),
        AdminRoute("DELETE", one, a.REMOVE_MODEL, remove_model, ModelAnswer, EmptyBody),
    )


def _check_texts(model: ModelSettings) -> None:
    """Refuse texts that could stand in no row and no record, and paths that begin nowhere in particular.

    Names have a form of their own.
    """
    texts = {
        "source": model.source,
        "chat_template": model.chat_template,
        "engine.device": model.engine.device,
    }
    for field, value in texts.items():
        if value is not None and not value.isprintable():
            raise InvalidValue(f"{field} must hold printable characters only", field)
    kind, _, path = model.source.partition(":")
    for field, value in (
        ("source", None if kind == "package" else path),
        ("chat_template", model.chat_template),
    ):
        if value is not None and not value.startswith(("/", "~")):
            raise InvalidValue(f"{field} must hold an absolute path", field)
    refuse_keys({**texts, "name": model.name, "aliases": " ".join(model.aliases)})


def _desk(exchange: AdminExchange) -> ModelDesk:
    if exchange.desk.models is None:
        raise Conflict("the models of this platform are set where it is deployed; change them there")
    return exchange.desk.models


def _name(exchange: AdminExchange) -> str:
    return str(exchange.request.path_params["model_name"])


async def _change(exchange: AdminExchange, desk: ModelDesk, decide: Decide) -> Response:
    _, seen = await desk.read()
    action = exchange.route.action

    def enclosing(beside: Callable[[object, RegistryChange], None]) -> None:
        desk.registry.change(decide, beside)

    def record(writer: Writer, change: RegistryChange) -> dict[str, Any]:
        before, after = change.before, change.after
        if before != after:
            target = Target(TargetKind.MODEL, after.name)
            writer.record(
                AuditRecord(
                    action, Outcome.DONE, exchange.caller, target, _recorded(before), _recorded(after)
                )
            )
        settings = after.settings or next(m for m in desk.file.models if m.name == after.name)
        return _entry(settings, after, _after(after, seen.get(after.name)), None)

    answer = await exchange.change_within(enclosing, record)
    if desk.catch_up is not None:
        await desk.catch_up()
    return answer


def _after(row: WantedModel, seen: SeenModel | None) -> SeenModel:
    """What is to be said of a model right after a change, before anybody has looked."""
    is_up_to_date = seen is not None and seen.generation == row.generation
    if seen is not None and is_up_to_date and row.is_removed is (seen.state is ModelState.REMOVING):
        return seen
    serving = None if seen is None or row.is_removed else seen.serving
    state = ModelState.STARTING if serving is None else ModelState.UPDATING
    count = 0 if seen is None else seen.num_replicas
    return SeenModel(
        row.name, ModelState.REMOVING if row.is_removed else state, row.generation, serving, count
    )


def _recorded(row: WantedModel | None) -> dict[str, Any] | None:
    if row is None:
        return None
    return {"generation": row.generation, "is_removed": row.is_removed, "settings": shown_settings(row)}


async def _entries(exchange: AdminExchange) -> list[dict[str, Any]]:
    cards, desk = exchange.gateway.client.models(), exchange.desk.models
    if desk is None:
        return [_bare(exchange, card) for card in cards.values()]
    rows, seen = await desk.read()
    by_name = {row.name: row for row in rows}
    served = served_models(desk.file.models, rows)
    entries = []
    for name, model in served.items():
        row = None if name not in by_name else by_name[name]
        state = seen.get(name) or _unseen(name, model.generation, cards.get(name))
        if state.generation != model.generation:
            state = _after(row or WantedModel(name, None, model.generation), state)
        entries.append(_entry(model.settings, row, state, cards.get(name), is_file=model.is_from_file))
    for row in rows:
        if row.name in served or (row.settings is None and not row.is_unreadable):
            continue
        state = _after(row, seen.get(row.name))
        if not row.is_removed:
            reason = (
                "its settings were written by another version; add it again"
                if row.is_unreadable
                else "a name of it stands in the configuration file now; remove it, or add it by other names"
            )
            state = SeenModel(row.name, ModelState.FAILED, row.generation, reason=reason)
        entries.append(_entry(row.settings, row, state, None))
    return sorted(entries, key=lambda entry: str(entry["id"]))


def _unseen(name: str, generation: int, card: ModelCard | None) -> SeenModel:
    state = ModelState.STARTING if card is None else ModelState.READY
    return SeenModel(name, state, generation, None if card is None else generation)


def _entry(
    settings: ModelSettings | None,
    row: WantedModel | None,
    seen: SeenModel,
    card: ModelCard | None,
    *,
    is_file: bool = False,
) -> dict[str, Any]:
    is_file = is_file or (row is not None and row.settings is None and not row.is_unreadable)
    found = {} if settings is None else settings.model_dump(mode="json")
    return {
        "id": seen.name,
        "object": "model",
        "name": seen.name,
        "aliases": found.get("aliases", []),
        "source": found.get("source"),
        "chat_template": found.get("chat_template"),
        "engine": found.get("engine"),
        "replicas": found.get("replicas"),
        "origin": "file" if is_file else "api",
        "state": seen.state.value,
        "reason": seen.reason or None,
        "retry_at": _time(seen.retry_at),
        "generation": seen.generation,
        "serving_generation": seen.serving,
        "num_replicas": seen.num_replicas,
        "changed_by": None if row is None else row.changed_by,
        "changed_at": None if row is None else _time(row.changed_at),
        **_card_fields(card),
    }


def _bare(exchange: AdminExchange, card: ModelCard) -> dict[str, Any]:
    """A model of a platform that has no registry."""
    count = sum(model == card.name for model, _ in exchange.gateway.client.stats())
    empty: Mapping[str, Any] = dict.fromkeys(("engine", "replicas", "changed_by", "changed_at", "retry_at"))
    return {
        **empty,
        "id": card.name,
        "object": "model",
        "name": card.name,
        "aliases": list(card.aliases),
        "source": card.source,
        "chat_template": card.chat_template_file,
        "origin": "file",
        "state": ModelState.READY.value,
        "reason": None,
        "generation": 1,
        "serving_generation": 1,
        "num_replicas": count,
        **_card_fields(card),
    }


def _card_fields(card: ModelCard | None) -> dict[str, Any]:
    """What only a replica knows."""
    return {
        "created": None if card is None else card.created,
        "max_model_len": None if card is None else card.max_model_len,
        "dtype": None if card is None else card.dtype,
    }


def _time(at: datetime | None) -> str | None:
    if at is None:
        return None
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
