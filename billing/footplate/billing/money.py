"""Amounts of money: integers of 10⁻¹² of a currency's unit ("pico"), from the price to the ledger. Pure.

Nothing here is a float. An amount is rounded once, for a line that is shown to somebody who pays, to the
currency's smallest coin and half away from zero.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

PICO = 10**12
_PICO_DIGITS = 12
# Twenty digits before the point hold every amount that anybody will bill.
_DECIMAL = re.compile(r"(-?)([0-9]{1,20})(?:\.([0-9]{1,30}))?", re.ASCII)
_CURRENCY = re.compile(r"[A-Z]{3}", re.ASCII)
# ISO 4217: all others have two digits.
_DIGITS = {
    **dict.fromkeys(
        "BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX UYI VND VUV XAF XOF XPF".split(),
        0,
    ),
    **dict.fromkeys("BHD IQD JOD KWD LYD OMR TND".split(), 3),
    **dict.fromkeys("CLF UYW".split(), 4),
}


def check_currency(code: str) -> str:
    """The code itself. Raises ValueError when it is not three capital letters (ISO 4217)."""
    if not _CURRENCY.fullmatch(code):
        raise ValueError(f"{code[:20]!r} is no currency; use three capital letters of ISO 4217, such as USD")
    return code


def minor_digits(currency: str) -> int:
    """How many digits the smallest coin of a currency has: 2 for USD, 0 for JPY, 3 for KWD."""
    return _DIGITS.get(currency, 2)


def scaled(text: str, digits: int) -> int:
    """A decimal text times 10^digits, exactly.

    Raises:
        ValueError: it is no plain decimal, or has more digits than fit.
    """
    matched = _DECIMAL.fullmatch(text)
    if matched is None:
        raise ValueError(f"{text[:40]!r} is no decimal number; write digits and a point, such as 0.25")
    sign, whole, fraction = matched[1], matched[2], (matched[3] or "").rstrip("0")
    if len(fraction) > digits:
        raise ValueError(
            f"{text[:60]} has {len(fraction)} digits after the point; at most {digits} are exact"
        )
    value = int(whole + fraction.ljust(digits, "0"))
    return -value if sign else value


def parse_amount(text: str) -> int:
    """Pico of a decimal text such as `12.5`. Raises ValueError."""
    return scaled(text, _PICO_DIGITS)


def decimal_text(value: int, digits: int = _PICO_DIGITS, *, at_least: int = 0) -> str:
    """An integer of 10^-digits as a decimal text, without zeros at the end beyond `at_least` digits."""
    sign, number = ("-", -value) if value < 0 else ("", value)
    whole, fraction = divmod(number, 10**digits)
    tail = f"{fraction:0{digits}d}"[:digits].rstrip("0") if digits else ""
    tail = tail.ljust(at_least, "0")
    return f"{sign}{whole}.{tail}" if tail else f"{sign}{whole}"


def as_decimal(pico: int) -> Decimal:
    """The amount in units of the currency, exactly."""
    return Decimal(decimal_text(pico))


def divide_half_away(value: int, divisor: int) -> int:
    """`value / divisor` to the nearest integer; a half goes away from zero. The divisor is positive."""
    quotient, rest = divmod(abs(value), divisor)
    quotient += 2 * rest >= divisor
    return -quotient if value < 0 else quotient


def round_to_coin(pico: int, currency: str) -> int:
    """Pico of the nearest amount that the currency has a coin for, half away from zero."""
    coin: int = 10 ** (_PICO_DIGITS - minor_digits(currency))
    return divide_half_away(pico, coin) * coin


def rounding_row(exact: Sequence[int], currency: str) -> tuple[tuple[int, ...], int, int]:
    """Lines as they are printed, the rounding row, and the total: lines and row sum to the total.

    The total is the exact sum, rounded once.
    """
    lines = tuple(round_to_coin(amount, currency) for amount in exact)
    total = round_to_coin(sum(exact), currency)
    return lines, total - sum(lines), total


def coin_text(pico: int, currency: str) -> str:
    """A rounded amount with all digits of its currency: `12.50`, `1200`.

    Raises:
        ValueError: it is not rounded.
    """
    if round_to_coin(pico, currency) != pico:
        raise ValueError(
            "only an amount that was rounded to the currency's coin can be printed with its digits"
        )
    return decimal_text(pico, at_least=minor_digits(currency))
