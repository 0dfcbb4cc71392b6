"""`footplate eval cascade`: its files, its refusals, and that the committed figures follow from answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from footplate.deployments.cli.eval import eval_commands
from footplate.platform.cli.errors import CommandError

ROOT = Path(__file__).parents[2]
SET, RESULTS = ROOT / "routing/eval/small_tasks.jsonl", ROOT / "routing/eval/results"


def run(*arguments: object) -> str:
    result = CliRunner().invoke(eval_commands, ["cascade", *map(str, arguments)], catch_exceptions=True)
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A folder with both models' answers of an earlier run."""
    for name in ("small", "large"):
        shutil.copy(RESULTS / f"answers_{name}.jsonl", tmp_path)
    return tmp_path


def test_the_committed_figures_follow_from_the_committed_answers(kept: Path) -> None:
    """Set, classifier, thresholds and table can't drift apart."""
    pytest.importorskip("matplotlib")
    said = run("--set", SET, "--out", kept, "--policy", "all", "--reuse-answers")
    found, wanted = (json.loads((folder / "cascade.json").read_text()) for folder in (kept, RESULTS))
    for part in ("set", "better", "policies", "curves"):
        assert found[part] == wanted[part], part
    assert (kept / "routes.yaml").read_text() == (RESULTS / "routes.yaml").read_text()
    assert (kept / "cascade.png").read_bytes().startswith(b"\x89PNG")
    threshold = wanted["policies"]["confidence"]["calibration"]["threshold"]
    assert f"threshold {threshold:.3f}" in said


def test_the_risk_that_is_asked_for_bounds_what_calibration_lost(kept: Path) -> None:
    for risk in (0.03, 0.1):
        run("--set", SET, "--out", kept, "--policy", "all", "--reuse-answers", "--no-plot", "--risk", risk)
        for policy in json.loads((kept / "cascade.json").read_text())["policies"].values():
            calibration = policy["calibration"]
            assert calibration["loss"] <= calibration["loss_bound"] <= risk


def test_what_cannot_be_used_is_said_in_a_line(kept: Path) -> None:
    good = ("--set", SET, "--out", kept, "--reuse-answers", "--no-plot")
    wrong: tuple[tuple[tuple[object, ...], str], ...] = (
        ((*good, "--risk", "0"), "--risk"),
        ((*good, "--small-price", "1"), "--small-price"),
        ((*good, "--small-price", "1,nan"), "--small-price"),
        ((*good, "--options", "[]"), "--options"),
        ((*good, "--classifier", kept / "none.json"), "--classifier"),
        (("--set", kept / "none.jsonl", "--out", kept), "--set"),
        (("--set", RESULTS / "cascade.json", "--out", kept), "line 1"),
    )
    for arguments, words in wrong:
        with pytest.raises(CommandError, match=words) as caught:
            run(*arguments)
        assert "\n" not in str(caught.value)
    (kept / "answers_large.jsonl").write_text(
        (kept / "answers_large.jsonl").read_text().replace("t0001", "x")
    )
    with pytest.raises(CommandError, match="another set"):
        run(*good)
