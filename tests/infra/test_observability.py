"""Rules and dashboards: each name in them is one that a gateway tells of, or that a rule records."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.infra.exposed_metrics import gateway_metrics, label_values, series_names

INFRA = Path(__file__).parents[2] / "infra"
RULES = INFRA / "prometheus" / "rules.yaml"
DASHBOARDS = sorted((INFRA / "grafana").glob("*.json"))
_NAME = re.compile(r"(?<![\w:$])[a-zA-Z_:][\w:]*(?!\s*\()(?![\w:])")
_WORDS = {
    "by",
    "without",
    "and",
    "or",
    "unless",
    "on",
    "ignoring",
    "group_left",
    "group_right",
    "bool",
    "offset",
}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    async def collect() -> list[Any]:
        return list(gateway_metrics(tmp_path_factory.mktemp("journal")).collect())

    return asyncio.run(collect())


@pytest.fixture(scope="module")
def known(families: list[Any]) -> set[str]:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    return series_names(families) | recorded


def rules() -> Iterator[dict[str, Any]]:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from group["rules"]


def dashboard_expressions(path: Path) -> Iterator[str]:
    board = json.loads(path.read_text())
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"].removeprefix("label_values(").partition(",")[0]


def metric_names(expression: str) -> set[str]:
    """The series that a PromQL expression reads."""
    bare = re.sub(r'"[^"]*"', "", expression)
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]", " ", bare)
    bare = re.sub(r"\b(by|without|on|ignoring)\s*\([^)]*\)", " ", bare)
    return {name for name in _NAME.findall(bare) if name not in _WORDS}


def label_filters(expression: str) -> Iterator[tuple[str, str, str]]:
    """(series, label, value) of each equality."""
    for name, inside in re.findall(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}", expression):
        for label, value in re.findall(r'(\w+)="([^"$]*)"', inside):
            yield name, label, value


def expressions() -> dict[str, list[str]]:
    found = {path.name: list(dashboard_expressions(path)) for path in DASHBOARDS}
    found["rules.yaml"] = [rule["expr"] for rule in rules()]
    return found


def test_expressions_are_read_right() -> None:
    text = 'sum by (le, x) (rate(vllm:a_bucket{le="2.5"}[5m])) / max(footplate:b:rate5m) > 4 * c and d'
    assert metric_names(text) == {"vllm:a_bucket", "footplate:b:rate5m", "c", "d"}


def test_every_metric_is_one_that_the_code_exposes(known: set[str]) -> None:
    for source, found in expressions().items():
        assert found
        for expression in found:
            unknown = metric_names(expression) - known
            assert metric_names(expression), f"{source}: no metric in {expression}"
            assert not unknown, f"{source}: nobody exposes {sorted(unknown)}"


def test_bounds_are_buckets_that_the_code_has(families: list[Any]) -> None:
    """A bound that no bucket has gives no series, and an alert that never comes."""
    buckets = label_values(families, "le")
    asked = [
        (name, value)
        for found in expressions().values()
        for expression in found
        for name, label, value in label_filters(expression)
        if label == "le"
    ]
    assert asked
    assert [(name, bound) for name, bound in asked if bound not in buckets[name]] == []


def test_what_all_gateways_tell_of_an_engine_is_not_added_up() -> None:
    """Two gateways would show every engine's tokens twice."""
    shared = re.compile(r"vllm:(num_|kv_|prefix_cache|prompt_tokens|generation_tokens|request_success)")
    for source, found in expressions().items():
        for expression in found:
            for match in shared.finditer(expression):
                before = expression[: match.start()]
                if source != "rules.yaml" and expression == match.string[match.start() :]:
                    continue  # the list of models
                assert re.search(r"max by \([\w, ]*\bengine\b[\w, ]*\)\s*\((rate\()?$", before), (
                    f"{source}: {expression} adds up what is told by each gateway"
                )


def test_objectives_have_p50_p95_and_p99_and_goodput() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for what in ("first_token_seconds", "token_gap_seconds", "request_seconds"):
        assert {f"footplate:{what}:{p}_5m" for p in ("p50", "p95", "p99")} <= recorded
    assert {"footplate:good_requests:rate5m", "footplate:good_tokens:rate5m"} <= recorded


def test_alerts_say_how_grave_it_is_and_what_to_do() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) > 8
    for rule in alerts:
        assert rule["labels"]["severity"] in ("page", "warn")
        assert rule["annotations"].keys() == {"summary", "mend"}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_can_be_imported_anywhere(path: Path) -> None:
    board = json.loads(path.read_text())
    assert board["uid"] == path.stem
    names = {variable["name"] for variable in board["templating"]["list"]}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= names


def test_the_four_dashboards_are_there() -> None:
    assert {path.stem.removeprefix("footplate-") for path in DASHBOARDS} == {
        "platform",
        "engines",
        "tenants",
        "billing",
    }


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on the path")
@pytest.mark.parametrize("command", [["check", "rules"], ["test", "rules"]], ids=" ".join)
def test_promtool_agrees(command: list[str]) -> None:
    file = RULES if command[0] == "check" else INFRA / "prometheus" / "tests" / "rules.yaml"
    done = subprocess.run(["promtool", *command, str(file)], capture_output=True, text=True, check=False)
    # 3: its linter dislikes colons in names of series that others chose.
    assert done.returncode in ((0, 3) if command[0] == "check" else (0,)), done.stdout + done.stderr
