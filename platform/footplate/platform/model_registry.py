"""Which models are wanted: those of the configuration file, and those that were added since. Pure rules.

A wanted model has a generation, which every change and every reload raises. Whoever runs the models compares
it with what runs; see `footplate.deployments.model_registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol

from footplate.platform.settings import ModelSettings, Settings
from footplate.tenancy.errors import Conflict, NameTaken, NotFound

FIRST_GENERATION = 1
NO_SUCH_MODEL = "there is no such model; GET /admin/v1/models lists them"


class ModelState(StrEnum):
    """What has become of a wanted model.

    UPDATING: another generation of it serves until the wanted one can. FAILED: the wanted one can't start and
    is tried again later; an older one may go on serving. REMOVING: it begins nothing new and ends its
    streams.
    """

    STARTING = "starting"
    READY = "ready"
    UPDATING = "updating"
    FAILED = "failed"
    REMOVING = "removing"


@dataclass(frozen=True, slots=True)
class WantedModel:
    """One row of the registry. `settings` None: the model is the configuration file's, the row its reloads.

    `changed_by` is a key's public id; times are the store's.
    """

    name: str
    settings: ModelSettings | None
    generation: int = FIRST_GENERATION
    is_removed: bool = False
    changed_by: str = ""
    added_at: datetime | None = None
    changed_at: datetime | None = None
    # Its settings are of another version of the platform, which this one can't read.
    is_unreadable: bool = False


@dataclass(frozen=True, slots=True)
class SeenModel:
    """What was last seen of a model. `serving`: the generation that answers requests; None: none does.

    `reason` says why it failed; `retry_at`: when it is tried again.
    """

    name: str
    state: ModelState
    generation: int
    serving: int | None = None
    num_replicas: int = 0
    reason: str = ""
    retry_at: datetime | None = None
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class RegistryChange:
    """What an administrator has changed. Nothing where `before` is `after`."""

    before: WantedModel | None
    after: WantedModel


Decide = Callable[[Mapping[str, WantedModel]], RegistryChange]


class ModelRegistry(Protocol):
    """Where wanted models are kept. Methods block; any thread may call. All raise StoreUnavailable."""

    def rows(self) -> Sequence[WantedModel]:
        """All rows by name, those that are being removed too."""
        ...

    def seen(self) -> Mapping[str, SeenModel]:
        """By name, what was last seen of each."""
        ...

    def change(self, decide: Decide, beside: Callable[[object, RegistryChange], None]) -> None:
        """One change, alone among all: `decide` sees the rows by name; `beside` gets the transaction's
        connection and the change before it is committed."""
        ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model as it is to run: the file's or an administrator's."""

    settings: ModelSettings
    generation: int
    is_from_file: bool

    @property
    def name(self) -> str:
        """What clients send as the model."""
        return self.settings.name


def served_models(file: Iterable[ModelSettings], rows: Iterable[WantedModel]) -> dict[str, ServedModel]:
    """What is to run, by name: the file goes before the registry, and what is being removed is left out."""
    by_name = {row.name: row for row in rows}
    found = {}
    for model in file:
        row = by_name.pop(model.name, None)
        # A row with settings of its own is one that the file has taken the name of.
        generation = row.generation if row is not None and row.settings is None else FIRST_GENERATION
        found[model.name] = ServedModel(model, generation, is_from_file=True)
    taken = {name for model in found.values() for name in (model.name, *model.settings.aliases)}
    for name, row in by_name.items():
        if row.settings is None or row.is_removed or taken & {name, *row.settings.aliases}:
            continue
        found[name] = ServedModel(row.settings, row.generation, is_from_file=False)
    return found


def put_model(
    file: Settings, rows: Mapping[str, WantedModel], model: ModelSettings, by: str
) -> RegistryChange:
    """A new model, or another version of one that was added. The same again changes nothing.

    Raises:
        Conflict: the model is the configuration file's.
        NameTaken: the name or an alias stands for another model, an alias or a route.
    """
    if model.name in {each.name for each in file.models}:
        raise Conflict(
            f"the model {model.name!r} stands in the configuration file; change it there and start again"
        )
    taken = _names_of_others(file, rows, model.name)
    for name in (model.name, *model.aliases):
        if name in taken:
            raise NameTaken(f"the name {name!r} stands for another model, alias or route; choose another")
    if len({model.name, *model.aliases}) < 1 + len(model.aliases):
        raise NameTaken("an alias is given twice or is the model's own name; give each name once")
    before = rows.get(model.name)
    if before is None:
        return RegistryChange(None, WantedModel(model.name, model, changed_by=by))
    if before.settings == model and not before.is_removed:
        return RegistryChange(before, before)
    after = replace(
        before,
        settings=model,
        generation=before.generation + 1,
        is_removed=False,
        changed_by=by,
        is_unreadable=False,
    )
    return RegistryChange(before, after)


def reload_model(file: Settings, rows: Mapping[str, WantedModel], name: str, by: str) -> RegistryChange:
    """The same model anew, from its files as they are now.

    Raises:
        NotFound: there is none of that name.
    """
    row = rows.get(name)
    if name in {model.name for model in file.models}:
        before = row if row is not None and row.settings is None else WantedModel(name, None)
        after = replace(before, generation=before.generation + 1, changed_by=by)
        return RegistryChange(before, after)
    if row is None or row.settings is None or row.is_removed:
        raise NotFound(NO_SUCH_MODEL)
    return RegistryChange(row, replace(row, generation=row.generation + 1, changed_by=by))


def remove_model(file: Settings, rows: Mapping[str, WantedModel], name: str, by: str) -> RegistryChange:
    """A model that is wanted no longer. One that is being removed already changes nothing.

    Raises:
        Conflict: the model is the configuration file's, or a route needs it.
        NotFound: there is none of that name.
    """
    if name in {model.name for model in file.models}:
        raise Conflict(
            f"the model {name!r} stands in the configuration file; take it out there and start again"
        )
    row = rows.get(name)
    if row is None or (row.settings is None and not row.is_unreadable):
        raise NotFound(NO_SUCH_MODEL)
    if row.is_removed:
        return RegistryChange(row, row)
    return RegistryChange(row, replace(row, is_removed=True, changed_by=by))


def shown_settings(row: WantedModel | None) -> dict[str, Any] | None:
    """A row's settings as records and answers have them."""
    if row is None or row.settings is None:
        return None
    return row.settings.model_dump(mode="json")


def _names_of_others(file: Settings, rows: Mapping[str, WantedModel], name: str) -> set[str]:
    settings = [*file.models, *(row.settings for row in rows.values() if row.settings is not None)]
    taken = {each for other in settings if other.name != name for each in (other.name, *other.aliases)}
    return taken | {route.name for route in file.routes}
