"""`footplate bench engine` on a tiny model: every row is measured or says why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from footplate.deployments.cli.main import application
from footplate.engine.errors import LoadError
from footplate.platform.cli.errors import CommandError
from tests.engine.test_triton_engine import SHAPE


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPE))
    return f"dummy:{path}"


def test_rows_carry_figure_spread_and_roofline(source: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = json.dumps({"kv_cache_gib": 0.01, "device": "cpu"})
    command = ["bench", "engine", "--source", source, "--rounds", "1", "--options", options]
    found = CliRunner().invoke(application, [*command, "--json", str(out)], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    written = json.loads(out.read_text())
    assert {"commit", "hardware", "versions", "command", "rows"} <= written.keys()
    by_name = {row["workload"]: row for row in written["rows"]}
    steps, prompts = ["single", "decode 8", "decode 32"], ["prefill 512", "prefill 1024"]
    assert list(by_name) == [*steps, *prompts, "mixed", "prefix cold", "prefix warm"]
    for name in prompts:  # this model holds 512 tokens, output included
        assert by_name.pop(name)["value"] is None and f"{name:14}    skipped" in found.output
    for name, row in by_name.items():
        assert row["spread"]["min"] <= row["value"] <= row["spread"]["max"], name
        roofline = row["roofline"]
        assert roofline["bytes"] > 0 and roofline["flops"] > 0, name
        assert roofline["floor_ms"] > 0, name
        if name not in steps:  # the time of a few tiny steps may be lost in noise
            assert row["value"] > 0 and 0 < roofline["share"] < 1, name
        assert roofline["ceiling_bytes_s"] > 1e8 and roofline["ceiling_flops_s"] > 1e8
    assert by_name["decode 32"]["roofline"]["flops"] > 3 * by_name["decode 8"]["roofline"]["flops"]
    # What is found in the cache is not computed again; when cold, those of one group share it already.
    assert by_name["prefix warm"]["roofline"]["flops"] < by_name["prefix cold"]["roofline"]["flops"] * 0.7


def test_what_can_not_be_run_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    runner = CliRunner()
    for arguments in (["--workloads", "single,nope"], ["--options", "[]"], ["--options", "{"]):
        found = runner.invoke(application, ["bench", "engine", *arguments])
        assert found.exit_code == 2
    with pytest.raises(LoadError, match=r"engine\.dtpe is no option"):
        runner.invoke(application, ["bench", "engine", "--options", '{"dtpe": 1}'], catch_exceptions=False)
    with pytest.raises(CommandError, match="there is no folder"):
        runner.invoke(
            application,
            ["bench", "engine", "--json", str(tmp_path / "no" / "out.json")],
            catch_exceptions=False,
        )
