"""Arrays go up together, keep their values and shapes, and begin where kernels expect pointers."""

from __future__ import annotations

import numpy as np
import torch

from footplate.engine.runner.staging import SLOTS, Staging


def test_arrays_of_any_size_come_back_whole_and_aligned() -> None:
    staging = Staging(torch.device("cpu"))
    arrays = [
        np.arange(n, dtype=np.int32).reshape(shape)
        for n, shape in ((1, (1,)), (6, (2, 3)), (0, (0,)), (17, (17,)))
    ]
    moved = staging.put_all(*arrays, np.array([2**31 - 1, -5], dtype=np.int64))
    for array, tensor in zip(arrays, moved, strict=False):
        assert np.array_equal(tensor.numpy(), array) and tensor.shape == array.shape
    assert moved[-1].tolist() == [2**31 - 1, -5]
    first = moved[0].data_ptr()
    assert all((tensor.data_ptr() - first) % 16 == 0 for tensor in moved if tensor.numel())


def test_a_buffer_that_comes_round_again_changes_nothing_that_was_handed_out() -> None:
    staging = Staging(torch.device("cpu"))
    sent = [staging.put(np.full(3, i, dtype=np.int32)) for i in range(3 * SLOTS)]
    assert [int(tensor[0]) for tensor in sent] == list(range(3 * SLOTS))
