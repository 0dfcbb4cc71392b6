"""The loads are the same on every engine and machine, and the small ones fit a small vocabulary."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from footplate.engine.bench.loads import build
from footplate.engine.bench.suite import WORKLOADS, rows
from footplate.engine.bench.workloads import HIGH, mixed_lengths

ROOT = Path(__file__).parent.parent.parent.parent


def test_the_full_mixed_load_has_the_lengths_that_results_were_measured_with() -> None:
    prompts, outputs = build({"kind": "mixed"}, seed=1)
    assert [(len(p), o) for p, o in zip(prompts, outputs, strict=True)] == mixed_lengths()
    assert sum(outputs) == 200_526


def test_prefixes_are_shared_in_groups_and_met_again_by_their_own_seed() -> None:
    load = {"kind": "prefix", "groups": 3, "per_group": 2, "shared": 8, "fresh": 4, "out": 5}
    prompts, outputs = build(load, seed=1)
    heads = [tuple(p[:8]) for p in prompts]
    assert sorted(heads.count(head) for head in set(heads)) == [2, 2, 2]
    assert len({tuple(p[8:]) for p in prompts}) == 6 and outputs == [5] * 6
    again = [build(load | {"shared_seed": 9}, seed)[0] for seed in (1, 2)]
    assert [p[:8] for p in again[0]] == [p[:8] for p in again[1]]
    assert [p[8:] for p in again[0]] != [p[8:] for p in again[1]]


@pytest.mark.parametrize("size", ["full", "small"])
@pytest.mark.parametrize("high", [300, 49_152, HIGH])
def test_every_row_stays_inside_the_vocabulary(size: str, high: int) -> None:
    table = list(rows(WORKLOADS, size, high))  # type: ignore[arg-type]
    assert [row.workload.split()[0] for row in table if " " not in row.workload] == ["single", "mixed"]
    for row in table:
        prompts, _ = build(row.load, seed=3)
        assert all(0 <= min(p) and max(p) < high for p in prompts)


def test_the_figure_of_a_step_leaves_the_prompt_out() -> None:
    row = next(rows(["single"], "full", HIGH))
    assert row.steps == 255 and row.value(wall_s=0.51, out_tokens=256) == pytest.approx(2.0)
    rate = next(rows(["mixed"], "full", HIGH))
    assert rate.value(wall_s=2.0, out_tokens=500) == 250


def test_a_peers_environment_needs_numpy_only(tmp_path: Path) -> None:
    """The worker beside vLLM runs where Footplate is not installed: torch must not come in."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import engine.benchmarks.gpu_loads as loads;"
        "print(len(loads.build({'kind': 'single', 'out': 4}, 1)[0][0]),"
        "sorted({'torch', 'pydantic', 'tokenizers'} & set(sys.modules)))"
    )
    # -S leaves the editable install out; numpy comes back by its own folder.
    site = tmp_path / "site"
    site.mkdir()
    numpy = Path(sys.modules["numpy"].__file__ or "").parent
    for name in ("numpy", "numpy.libs"):
        if (numpy.parent / name).exists():
            (site / name).symlink_to(numpy.parent / name)
    environment = dict(os.environ, PYTHONPATH=str(site))
    found = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert found.stdout.strip() == "128 []", found.stderr
