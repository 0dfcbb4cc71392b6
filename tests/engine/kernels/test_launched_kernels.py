"""No kernel is launched that no test runs; which are interpreted and which wait for a GPU is written down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from footplate.engine.kernels.registry import PAIRS
from tests.engine.kernels.launched_kernels import (
    HOPPER_ONLY,
    INTERPRETED,
    MEASURING,
    find_kernels,
    has_test,
)


def test_every_kernel_is_run_by_a_pair_or_named_among_those_of_a_gpu() -> None:
    assert find_kernels() == {*INTERPRETED, *MEASURING, *HOPPER_ONLY}
    for place in {*MEASURING.values(), *HOPPER_ONLY.values()}:
        assert has_test(place), place


def test_a_kernel_is_found_wherever_it_lies_and_a_function_that_others_call_is_none(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    helper = "@gluon.jit\ndef _part(x):\n    return x\n"
    kernel = "@gluon.jit(debug=True)\ndef new_kernel(x, n):\n    gl.run([(_part, x)])\n"
    (tmp_path / "deep" / "other_name.py").write_text(helper + kernel)
    (tmp_path / "plain.py").write_text("def new_kernel(x):\n    return x\n")
    assert find_kernels(tmp_path) == {"deep.other_name:new_kernel"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
@pytest.mark.parametrize("kernel", INTERPRETED)
def test_the_named_pair_launches_the_kernel(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    launched: set[str] = set()
    run = interpreter.GridExecutor.__call__

    def noted(executor: Any, *args: Any, **options: Any) -> Any:
        launched.add(f"{executor.fn.__module__.removeprefix('footplate.engine.')}:{executor.fn.__name__}")
        return run(executor, *args, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", noted)
    pair = next(pair for pair in PAIRS if pair.name == INTERPRETED[kernel])
    for case in pair.cases:
        pair.kernel(*case.build())
        if kernel in launched:
            return
    pytest.fail(f"{pair.name} launched {sorted(launched)}")
