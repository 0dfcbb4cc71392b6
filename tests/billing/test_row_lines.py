"""Lines of files: texts of any kind come through as CSV and as JSON, and amounts keep every digit."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.billing.errors import ExportDiffers
from footplate.billing.exports.cells import CsvForm, JsonForm, decimal_12
from footplate.billing.exports.columns import USAGE as COLUMNS
from footplate.billing.exports.row_layout import USAGE, Dimension, Frame
from footplate.billing.exports.row_lines import FIELDS, NULL, RowLines, moment
from footplate.billing.prices import ModelPrices, PriceBook
from tests.billing.builders import NOVEMBER, price_list, version

FRAME = Frame("USD", "2026-11-01T00:00:00Z", "2026-12-01T00:00:00Z", None)
ROW = {
    "dimension_id": "7", "price_version": "1", "event_id": "req_1", "part": "0", "kind": "usage",
    "counted_at": "2026-11-15 12:07:00.5+00", "started_at": "2026-11-15 12:07:00.5+00",
    "ended_at": "2026-11-15 12:07:02+00", "endpoint": "/v1/x", "batch_id": NULL, "state": "completed",
    "is_estimated": "f", "requests": "1", "input_uncached": "3", "input_cached": "0", "output": "0",
    "net_input": "3000000", "discount_input": "0", "net_cached_input": "0", "discount_cached_input": "0",
    "net_output": "0", "discount_output": "0",
}  # fmt: skip
# What no text in the books holds: see `check_text`.
TEXTS = st.text(st.characters(exclude_characters="\0\r\n", exclude_categories=["Cs"]))
ESCAPES = str.maketrans({"\\": r"\\", "\t": r"\t", "\b": r"\b", "\f": r"\f", "\v": r"\v"})


def maker(form: CsvForm | JsonForm, **dimension: str | bool) -> RowLines:
    texts: dict[str, str | bool] = {
        "tenant_id": "t", "key_id": "k", "cost_center": "42", "requested_model": "m", "model": "m",
        "labels": "{}", "is_batch": False, "price_model": "m",
    }  # fmt: skip
    known = Dimension(**{**texts, **dimension})  # type: ignore[arg-type]
    book = PriceBook([version(price_list(m=ModelPrices(1_000_000, 2, 4)))])
    made = RowLines(COLUMNS, USAGE, form, book, [(NOVEMBER, "2026-11-01")])
    made.begin(FRAME, {"7": known})
    return made


def row(**changes: str) -> str:
    assert set(changes) <= set(FIELDS) == set(ROW)
    return "\t".join({**ROW, **changes}[name] for name in FIELDS)


@given(TEXTS, TEXTS)
def test_any_text_comes_through_both_forms(constant: str, varying: str) -> None:
    given_row = row(endpoint=varying.translate(ESCAPES), event_id=varying.translate(ESCAPES))
    [line] = maker(CsvForm(), cost_center=constant).lines([given_row])
    read = next(csv.DictReader(io.StringIO(line, newline=""), [column.name for column in COLUMNS]))
    [shown] = maker(JsonForm(), cost_center=constant).lines([given_row])
    parsed = json.loads(shown)
    for found in (read, parsed):
        assert [found[name] for name in ("cost_center", "endpoint", "event_id")] == [
            constant, varying, varying,
        ]  # fmt: skip
    assert line.endswith("\n") and shown.endswith("\n")


@given(st.integers(-(10**37), 10**37))
def test_amounts_keep_every_digit(pico: int) -> None:
    text = decimal_12(str(pico))
    assert int(text.replace(".", "")) == pico
    assert len(text.partition(".")[2]) == 12 and text.partition(".")[0] not in ("", "-")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("2026-11-15 12:00:00+00", "2026-11-15T12:00:00.000000Z"),
        ("2026-11-15 12:00:00.5+00", "2026-11-15T12:00:00.500000Z"),
        ("2026-11-15 12:00:00.000001+00", "2026-11-15T12:00:00.000001Z"),
    ],
)
def test_moments_have_six_digits(text: str, shown: str) -> None:
    assert moment(text) == shown
    assert datetime.fromisoformat(shown).astimezone(UTC) == datetime.fromisoformat(text)


def test_a_batch_shows_its_own_price_and_what_the_list_would_have_been() -> None:
    [line] = maker(JsonForm(), is_batch=True).lines([row(net_input="1500000", discount_input="1500000")])
    found = json.loads(line)
    assert (found["unit_price"], found["cost"], found["list_cost"]) == (
        "0.000000500000", "0.000001500000", "0.000003000000",
    )  # fmt: skip


def test_each_class_is_a_line_and_the_request_counts_in_one() -> None:
    lines = maker(JsonForm()).lines([row(input_cached="5", output="9"), row(input_uncached="0")])
    found = [json.loads(line) for line in lines]
    assert [(each["token_class"], each["requests"], each["quantity"]) for each in found] == [
        ("input", 1, 3), ("cached_input", 0, 5), ("output", 0, 9), ("input", 1, 0),
    ]  # fmt: skip


def test_a_price_that_no_version_has_is_a_difference() -> None:
    with pytest.raises(ExportDiffers, match="version 9"):
        maker(CsvForm()).lines([row(price_version="9")])
