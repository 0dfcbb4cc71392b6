"""Events are recorded, rated and posted once, whoever sends them and how often."""

from __future__ import annotations

from tests.billing.builders import OpenBooks, event


def test_smoke(books: OpenBooks) -> None:
    first = event(tokens=(200, 800, 50, 20, 3))
    print(books.events.commit([first]))
    print(books.events.commit([first, event(batch_id="b")]))
    print(books.events.find(first.event_id))
    print(books.ledger.balances(), books.ledger.month_spend("tnt_a", books.clock.now))
    print(books.events.commit([event(served="none")]))
    lost = event(is_estimated=True)
    books.events.commit([lost])
    print(books.events.commit([event(lost.event_id, tokens=(100, 0, 30))]))
    print(books.ledger.balances(), books.ledger.month_spend("tnt_a", books.clock.now))
    print(books.periods.inspect(books.periods.first_open()))
