"""A statement as one HTML page: no outside assets, no scripts, ready to be printed or saved as PDF."""

from __future__ import annotations

from datetime import datetime
from html import escape
from zoneinfo import ZoneInfo

from footplate.billing.money import coin_text, decimal_text
from footplate.billing.prices import price_text
from footplate.billing.statements import Statement, StatementLine

_STYLE = """
:root { color-scheme: light; }
body { font: 14px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 2rem auto;
  max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 1rem 0 1.5rem; }
dt { color: #555; } dd { margin: 0; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .35rem .5rem; text-align: left; border-bottom: 1px solid #ddd; vertical-align: top; }
th.n, td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.m { overflow-wrap: anywhere; }
tfoot td { border-bottom: 0; } tfoot tr.total td { font-weight: 600; border-top: 2px solid #1a1a1a; }
p.note { color: #555; font-size: .85rem; }
.draft { color: #8a3b00; font-weight: 600; }
@page { size: A4; margin: 16mm; }
@media print { body { margin: 0; max-width: none; padding: 0; font-size: 10pt; }
  thead { display: table-header-group; }
  tr { break-inside: avoid; } }
""".strip()


def statement_html(statement: Statement, tenant_name: str) -> str:
    """The page. Everything that people have named is escaped."""
    zone = ZoneInfo(statement.head.timezone)
    period = statement.head.period
    facts = {
        "Tenant": f"{tenant_name} ({statement.head.tenant_id})",
        "Period": f"{_time(period.begins_at, zone)} up to and without {_time(period.ends_at, zone)}",
        "Time zone": statement.head.timezone,
        "Currency": statement.head.currency,
        "Requests": f"{statement.num_requests:,}",
        "Made": _time(statement.head.made_at, zone),
    }
    head = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    rows = "".join(_row(line, statement.head.currency) for line in statement.lines)
    title = f"Statement {period.id}"
    exact = f"{decimal_text(statement.exact_total)} {escape(statement.head.currency)}"
    draft = "" if statement.head.is_final else f'<p class="draft">{_draft_note(statement)}</p>'
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}: {escape(tenant_name)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1>{draft}<dl>{head}</dl>"
        '<table><thead><tr><th scope="col">Model</th><th scope="col">Charge</th><th scope="col">Tokens</th>'
        '<th scope="col" class="n">Quantity</th><th scope="col" class="n">Price per million</th>'
        '<th scope="col" class="n">Prices</th>'
        f'<th scope="col" class="n">Amount, {escape(statement.head.currency)}</th></tr></thead>'
        f"<tbody>{rows}</tbody><tfoot>{_foot(statement)}</tfoot></table>"
        '<p class="note">Each line is rounded once, half away from zero. The total is the exact sum, '
        f"{exact}, rounded once; the rounding row is "
        "the difference. “Prices” names the version of the price book.</p></body></html>\n"
    )


def _draft_note(statement: Statement) -> str:
    note = "The period is open: figures may still change."
    if statement.num_unpriced:
        note += f" {statement.num_unpriced:,} requests wait for a price and are not in them."
    return note


def _row(line: StatementLine, currency: str) -> str:
    token_class = line.token_class.value.replace("_", " ")
    amount = coin_text(line.rounded_amount, currency)
    return (
        f'<tr><td class="m">{escape(line.model)}</td><td>{escape(line.kind.value)}</td><td>{token_class}</td>'
        f'<td class="n">{line.quantity:,}</td><td class="n">{price_text(line.unit_price)}</td>'
        f'<td class="n">v{line.version_id}</td><td class="n">{amount}</td></tr>'
    )


def _foot(statement: Statement) -> str:
    rows = (("rounding", "Rounding", statement.rounding), ("total", "Total", statement.total))
    return "".join(
        f'<tr class="{name}"><td colspan="6">{label}</td>'
        f'<td class="n">{coin_text(amount, statement.head.currency)}</td></tr>'
        for name, label, amount in rows
    )


def _time(at: datetime, zone: ZoneInfo) -> str:
    return at.astimezone(zone).strftime("%Y-%m-%d %H:%M %Z")
