"""The shape of the repository: what every file may be, and what an import may cost."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMPONENTS = ("platform", "deployments", "engine", "routing", "tenancy", "billing")
SECTIONS = ("owns", "does not own", "invariants", "time and units", "failure")
TORCH_FREE = (
    "footplate.engine",
    "footplate.engine.types",
    "footplate.engine.errors",
    "footplate.engine.config",
    "footplate.engine.plan",
    "footplate.engine.prefix",
    "footplate.engine.validation",
    "footplate.engine.scheduler",
    "footplate.engine.core",
    "footplate.engine.async_engine",
    "footplate.engine.text.pipeline",
    "footplate.engine.weights.gguf",
)


def python_files() -> Iterator[Path]:
    for folder in (*COMPONENTS, "tests"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def test_no_top_level_folder_is_a_package() -> None:
    """`platform/__init__.py` would hide the standard library's module from the repository's root."""
    for folder in COMPONENTS:
        assert not (ROOT / folder / "__init__.py").exists()
        assert not (ROOT / folder / "footplate" / "__init__.py").exists()  # one namespace, many portions


@pytest.mark.parametrize("cwd", [ROOT, ROOT / "engine"])
def test_the_standard_librarys_platform_is_found(cwd: Path) -> None:
    code = "import platform, footplate.engine; print(platform.__file__); platform.machine()"
    found = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).is_relative_to(sysconfig.get_path("stdlib"))


def test_gateways_and_policies_import_no_torch() -> None:
    code = (
        f"import importlib, sys; [importlib.import_module(m) for m in {TORCH_FREE!r}]; "
        "print(sorted({'torch', 'triton', 'ray', 'fastapi', 'starlette', 'sqlalchemy'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("component", COMPONENTS)
def test_each_component_says_what_it_owns_and_how_it_fails(component: str) -> None:
    text = (ROOT / component / "README.md").read_text().lower()
    heads = [line.lstrip("#* ") for line in text.splitlines() if line.startswith(("## ", "**"))]
    for section in SECTIONS:
        assert any(head.startswith(section) for head in heads), f"{component}/README.md: no {section!r}"


def test_no_module_is_named_for_nothing() -> None:
    vague = {"util", "utils", "common", "helper", "helpers", "misc", "shared"}
    assert not [p for p in python_files() if vague & {p.stem, p.parent.name}]


def test_files_and_functions_stay_short() -> None:
    for path in python_files():
        text = path.read_text()
        assert text.count("\n") < 600, f"{path.relative_to(ROOT)} is too long"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                assert lines < 70, f"{path.relative_to(ROOT)}: {node.name} has {lines} lines"
