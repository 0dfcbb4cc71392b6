"""The Terraform modules: what each file must say, and what terraform itself makes of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import hcl2
import pytest

from tests.infra.terraform_program import ROOT, Terraform

MODULES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "modules").iterdir())
EXAMPLES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").iterdir())
FOLDERS = MODULES + EXAMPLES


@pytest.fixture(scope="module")
def terraform(tmp_path_factory: pytest.TempPathFactory) -> Terraform:
    found = Terraform.find(tmp_path_factory.mktemp("infra"))
    if isinstance(found, str):
        pytest.skip(found)
    return found


def parse(path: Path) -> dict[str, Any]:
    with path.open() as file:
        parsed: dict[str, Any] = hcl2.load(file)
    return parsed


def blocks(folder: str, kind: str) -> dict[str, dict[str, Any]]:
    """All blocks of a kind with one label, by that label."""
    found = {}
    for path in sorted((ROOT / folder).glob("*.tf")):
        for block in parse(path).get(kind, []):
            for name, body in block.items():
                found[name.strip('"')] = body
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_variables_and_outputs_are_described(folder: str) -> None:
    variables, outputs = blocks(folder, "variable"), blocks(folder, "output")
    assert outputs
    for name, body in variables.items():
        assert "type" in body, f"{folder}: the variable {name} has no type"
        assert "description" in body, f"{folder}: the variable {name} has no description"
    for name, body in outputs.items():
        assert "description" in body, f"{folder}: the output {name} has no description"


@pytest.mark.parametrize("folder", FOLDERS)
def test_versions_are_pinned_and_tests_are_there(folder: str) -> None:
    text = (ROOT / folder / "versions.tf").read_text()
    assert 'required_version = ">= 1.9"' in text
    assert 'version = ">= 5.100, < 7.0"' in text
    tests = list((ROOT / folder / "tests").glob("*.tftest.hcl"))
    assert tests, f"{folder} has no tests"
    assert all("mock_provider" in test.read_text() for test in tests), "a test must never reach a cloud"


@pytest.mark.parametrize("folder", MODULES)
def test_secrets_are_marked_so(folder: str) -> None:
    for name, body in blocks(folder, "variable").items():
        if name.endswith(("password", "token", "secret")):
            assert body.get("sensitive") is True, f"{folder}: {name} would be printed"


def test_examples_use_every_module() -> None:
    for example in EXAMPLES:
        used = {Path(body["source"].strip('"')).name for body in blocks(example, "module").values()}
        assert used == {Path(module).name for module in MODULES}


def test_the_readme_names_every_module() -> None:
    text = (ROOT / "README.md").read_text()
    assert [folder for folder in FOLDERS if f"`{folder}`" not in text] == []


def test_files_are_formatted(terraform: Terraform) -> None:
    done = terraform.run("fmt", "-check", "-recursive", "-no-color")
    assert done.returncode == 0, f"terraform fmt would change: {done.stdout}"


@pytest.mark.parametrize("folder", EXAMPLES)
def test_examples_are_valid(terraform: Terraform, folder: str) -> None:
    """Each brings all modules with it."""
    terraform.init(folder)
    done = terraform.run("validate", "-no-color", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif("FOOTPLATE_INFRA" not in os.environ, reason="`make infra` runs terraform test everywhere")
@pytest.mark.parametrize("folder", FOLDERS)
def test_plans_hold_what_they_promise(terraform: Terraform, folder: str) -> None:
    terraform.init(folder)
    done = terraform.run("test", "-no-color", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
