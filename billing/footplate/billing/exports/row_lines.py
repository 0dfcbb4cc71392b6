"""Lines of a file from what postings and events hold: the inner loop of every export. Pure."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TypeVar

from footplate.billing.errors import ExportDiffers
from footplate.billing.exports.cells import LineForm, decimal_12, safe_text
from footplate.billing.exports.columns import Column
from footplate.billing.exports.row_layout import (
    Dimension,
    Frame,
    RowGroup,
    RowTemplate,
    Source,
    Varying,
    make_template,
)
from footplate.billing.periods import BUCKET, bucket_of
from footplate.billing.prices import PriceBook, PriceVersionId
from footplate.billing.usage import ModelName, TokenClass

# A posting with its event, as texts: a moment as `2026-11-15 12:00:00.5+00`, a flag as `t` or `f`, None as
# `\N`, and what a tab or a line break would be in a text behind a backslash.
FIELDS = (
    "dimension_id price_version event_id part kind counted_at started_at ended_at endpoint batch_id state "
    "is_estimated requests input_uncached input_cached output net_input discount_input net_cached_input "
    "discount_cached_input net_output discount_output"
).split()
NULL = r"\N"
_UNPRICED = "0"
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
# What is the same in every form of a line.
_is_plain = re.compile(r"[A-Za-z0-9_.-]+", re.ASCII).fullmatch
_FLAGS = {"t": "true", "f": "false"}
_MAX_KEPT = 20_000
_Templates = tuple[RowTemplate, RowTemplate, RowTemplate]
_Made = TypeVar("_Made")


class RowLines:
    """Makes the lines of one file. `begin` comes before the rows of each part of a month."""

    def __init__(
        self,
        columns: Sequence[Column],
        sources: Mapping[str, Source],
        form: LineForm,
        prices: PriceBook,
        days: Sequence[tuple[datetime, str]],
    ) -> None:
        """`days` as `days_of` gives them."""
        self._columns = columns
        self._sources = sources
        self._form = form
        self._dimensions: Mapping[str, Dimension] = {}
        self._prices = prices
        self._shows_end = Varying.ENDED_AT in sources.values()
        self._day_begins = [begin for begin, _ in days]
        self._day_names = [form.text(name) for _, name in days]
        self._frame: Frame | None = None
        self._templates: dict[tuple[str, str], _Templates] = {}
        self._texts = _Kept(lambda text: form.text(_read(text)))
        self._batches = _Kept(self._batch)
        self._minutes = _Kept(self._minute)
        quote = form.text("a").replace("a", "")[:1]
        self._quotes = (quote, quote)
        self._correction, self._no_class = form.text("Correction"), form.text(None)

    def begin(self, frame: Frame, dimensions: Mapping[str, Dimension]) -> None:
        """The month whose rows come next, and their dimensions by the text of their ids."""
        self._dimensions = dimensions
        if frame != self._frame:
            self._frame = frame
            self._templates.clear()

    def lines(self, rows: Iterable[str]) -> list[str]:
        """Each row has `FIELDS` with tabs between them; each class of tokens that it has is a line.

        Raises:
            ExportDiffers: a row has a price that is in no version.
        """
        assert self._frame is not None
        # `2026-11-01T00:00:00Z`, to be compared with moments that have a fraction.
        month_begin = f"{self._frame.period_begin[:19]}.000000Z"
        templates, texts, batches, minutes = self._templates, self._texts, self._batches, self._minutes
        head, tail = self._quotes
        out: list[str] = []
        add = out.append
        for row in rows:
            (
                dimension, version, name, part, kind, at, started, ended, endpoint, batch, state,
                is_estimated, requests, uncached, cached, output,
                net_input, off_input, net_cached, off_cached, net_output, off_output,
            ) = row.split("\t")  # fmt: skip
            kept = templates.get((dimension, version)) or self._make(dimension, version)
            day, charge_begin, charge_end = minutes[at[:16]]
            started_at = moment(started)
            # Of a month that was invoiced before.
            is_late = kind != "usage" and started_at < month_begin
            event = (
                f"{head}{name}{tail}" if _is_plain(name) else texts[name],
                part,
                texts[kind],
                started_at if at == started else moment(at),
                day,
                started_at,
                moment(ended) if self._shows_end else "",
                texts[endpoint],
                batches[batch],
                texts[state],
                _FLAGS[is_estimated],
                charge_begin,
                charge_end,
                self._correction if is_late else self._no_class,
            )
            for template, count, quantity, net, off in (
                (kept[0], requests, uncached, net_input, off_input),
                (kept[1], "0", cached, net_cached, off_cached),
                (kept[2], "0", output, net_output, off_output),
            ):
                if quantity != "0" or count != "0":
                    pieces = template.pieces.copy()
                    pieces[1::2] = template.pick((*event, count, quantity, *_money(net, off)))
                    add("".join(pieces))
        return out

    def _make(self, dimension_id: str, version: str) -> _Templates:
        assert self._frame is not None
        if len(self._templates) >= _MAX_KEPT:
            self._templates.clear()
        frame, dimension = self._frame, self._dimensions[dimension_id]
        first, second, third = (
            make_template(
                self._columns,
                self._sources,
                RowGroup(frame, dimension, each, int(version), self._unit_price(dimension, version, each)),
                self._form,
            )
            for each in (TokenClass.INPUT, TokenClass.CACHED_INPUT, TokenClass.OUTPUT)
        )
        self._templates[dimension_id, version] = made = (first, second, third)
        return made

    def _unit_price(self, dimension: Dimension, version: str, token_class: TokenClass) -> int | None:
        if version == _UNPRICED:
            return None
        model = ModelName(dimension.price_model)
        try:
            prices = self._prices.by_id[PriceVersionId(int(version))].prices
            listed = prices.models[model].of(token_class)
        except KeyError:
            raise ExportDiffers(
                f"a row is priced by version {version}, which has no price for its model; "
                "run a reconciliation"
            ) from None
        return prices.batch_price(model, token_class) if dimension.is_batch else listed

    def _minute(self, text: str) -> tuple[str, str, str]:
        """The local day of a minute, and the quarter of an hour that it lies in."""
        at = datetime.fromisoformat(text).replace(tzinfo=UTC)
        begin = bucket_of(at)
        index = bisect_right(self._day_begins, at)
        return (
            self._day_names[index - 1] if index else self._form.text(None),
            f"{begin:%Y-%m-%dT%H:%M:%SZ}",
            f"{begin + BUCKET:%Y-%m-%dT%H:%M:%SZ}",
        )

    def _batch(self, text: str) -> str:
        read = _read(text)
        return self._form.text(None if read is None else safe_text(read))


class _Kept(dict[str, _Made]):
    """What was made of a text, for as many texts as fit."""

    def __init__(self, make: Callable[[str], _Made]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, text: str) -> _Made:
        if len(self) >= _MAX_KEPT:
            self.clear()
        self[text] = made = self._make(text)
        return made


def moment(text: str) -> str:
    """A moment in UTC with its microseconds, as RFC 3339."""
    if len(text) == 22:
        return f"{text[:10]}T{text[11:19]}.000000Z"
    return f"{text[:10]}T{text[11:-3]:0<15}Z"


def _money(net: str, discount: str) -> tuple[str, str, str]:
    """Cost, cost at list prices, and what a batch takes off, of pico."""
    cost = decimal_12(net)
    if discount == "0":
        return cost, cost, "0.000000000000"
    return cost, decimal_12(str(int(net) + int(discount))), decimal_12(discount)


def _read(text: str) -> str | None:
    if text == NULL:
        return None
    return _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], found[1]), text) if "\\" in text else text
