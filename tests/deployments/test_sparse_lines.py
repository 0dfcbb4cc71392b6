"""A loop that fails for ever writes a line now and then."""

from __future__ import annotations

from footplate.deployments.sparse_lines import SparseLines


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_line_is_due_when_it_is_new_and_again_after_minutes() -> None:
    clock = Clock()
    lines = SparseLines(300.0, clock)
    assert [lines.is_due("m", KeyError) for _ in range(3)] == [True, False, False]
    assert lines.is_due("m", OSError) and lines.is_due("n", KeyError)
    told = 0
    for _ in range(2_400):  # ten minutes at four a second, in two ways in turn
        clock.now += 0.25
        told += lines.is_due("m", KeyError) + lines.is_due("m", OSError)
    assert told == 4


def test_what_is_remembered_is_bounded() -> None:
    lines = SparseLines()
    assert all(lines.is_due(number) for number in range(5_000))
    assert len(lines._told_at) <= 1_024
