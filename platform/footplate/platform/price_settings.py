"""The file of first prices that a configuration names: read, and held against its models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from footplate.billing.errors import InvalidPrice
from footplate.billing.price_import import from_yaml
from footplate.billing.prices import PriceBook, PriceList, PriceVersion, PriceVersionId
from footplate.billing.usage import ModelName

MAX_SHOWN = 5


def prices_file(prices: str, config_file: Path | None) -> Path:
    """Where it is: a relative path begins at the folder of the configuration."""
    path = Path(prices)
    with suppress(RuntimeError):  # there is no such user: then the path as it is can't be read
        path = path.expanduser()
    return path if path.is_absolute() or config_file is None else config_file.absolute().parent / path


def read_prices(path: Path, currency: str) -> PriceList:
    """The list.

    Raises:
        InvalidPrice: it can't be read, is not as it must be, or is in another currency than the books.
    """
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise InvalidPrice(f"{path} can't be read: {error.strerror}", "") from error
    except UnicodeDecodeError as error:
        raise InvalidPrice(f"{path} is not UTF-8", "") from error
    except ValueError as error:
        raise InvalidPrice(f"{str(path)!r} is the name of no file", "") from error
    prices = from_yaml(text)
    if prices.currency != currency:
        raise InvalidPrice(f"prices are in {prices.currency}, billing.currency is {currency}", "currency")
    return prices


def faults_of_prices(
    prices: str, config_file: Path | None, currency: str, models: list[str]
) -> Iterator[str]:
    """What is wrong with it, in sentences that follow the name of the setting."""
    path = prices_file(prices, config_file)
    try:
        found = read_prices(path, currency)
    except InvalidPrice as error:
        yield f"can't be used: {f'{error.field}: ' if error.field else ''}{error}"
        return
    # A list that begins later is held against what it will be.
    at = max(datetime.now(UTC), found.effective_from)
    book = PriceBook([PriceVersion(PriceVersionId(1), found, at)])
    missing = without_price(book, models, at)
    if missing:
        yield missing


def without_price(book: PriceBook, models: list[str], at: datetime) -> str | None:
    """A sentence about models that have no price, once there are prices at all; None when each has one."""
    if not book.versions:
        return None
    missing = book.missing([ModelName(model) for model in models], at)
    if not missing:
        return None
    shown = ", ".join(missing[:MAX_SHOWN]) + (" and others" if len(missing) > MAX_SHOWN else "")
    return f"has no price for {shown}; import prices that name every model that is served"
