"""Dequantisation gives the numbers that the format's own library gives."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from footplate.engine.errors import LoadError
from footplate.engine.weights.gguf import TENSOR_TYPES
from footplate.engine.weights.gguf_tensors import dequantise, grouped_codes, half_split_rows, is_quantised

GOLDEN = json.loads((Path(__file__).parent / "dequantised.json").read_text("utf-8"))["types"]


@pytest.mark.parametrize("type_name", [known.name for known in TENSOR_TYPES.values()])
def test_values_are_the_formats_own_to_the_bit(type_name: str) -> None:
    golden = GOLDEN[type_name]
    rows, _ = golden["shape"]
    raw = np.frombuffer(base64.b64decode(golden["raw"]), np.uint8).reshape(rows, -1)
    wanted = np.frombuffer(base64.b64decode(golden["values"]), "<f4").reshape(golden["shape"])
    assert np.array_equal(dequantise(type_name, raw), wanted)


def test_float_types_hold_no_codes() -> None:
    assert not is_quantised("F32") and is_quantised("Q6_K")
    with pytest.raises(LoadError, match="F16"):
        grouped_codes("F16", np.zeros((1, 2), np.uint8))


def test_rotary_rows_come_out_half_split() -> None:
    """FAULTS a64."""
    # Head 0 of size 4 as files hold it: pairs (0, 2) and (1, 3) side by side.
    stored = np.array([[0], [2], [1], [3], [10], [12], [11], [13]])
    assert half_split_rows(stored, 2)[:, 0].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
