"""What routes did, from the ledger in PostgreSQL; see `RouteReader`."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import text

from footplate.billing.adapters.postgres.books import Books, reading
from footplate.billing.adapters.postgres.tables import SCHEMA, UNPRICED
from footplate.billing.prices import PriceVersionId
from footplate.billing.rating import ClassAmounts
from footplate.billing.route_savings import RouteUsage, RouteUse
from footplate.billing.time_ranges import TimeRange
from footplate.billing.usage import ModelName

# Adjustments are among the facts, so that a better count is in these sums as it is in every report.
_ANSWERS = text(f"""
select d.requested_model, d.served_model, f.price_version, d.is_batch, sum(f.requests),
       sum(f.input_uncached), sum(f.input_cached), sum(f.output),
       sum(f.gross_input + f.gross_cached_input + f.gross_output
           - f.discount_input - f.discount_cached_input - f.discount_output)
from {SCHEMA}.usage_facts f join {SCHEMA}.dimensions d on d.id = f.dimension_id
where f.effective_at >= :begin and f.effective_at < :end and d.requested_model = any(:routes)
group by 1, 2, 3, 4""")
# An attempt has no posting: it stands by its event's version.
_ATTEMPTS = text(f"""
select d.requested_model, a ->> 'model', coalesce(p.price_version, {UNPRICED}), d.is_batch,
       count(distinct e.seq), sum((a -> 'tokens' ->> 'input_uncached')::bigint),
       sum((a -> 'tokens' ->> 'input_cached')::bigint), sum((a -> 'tokens' ->> 'output')::bigint), 0
from {SCHEMA}.events e
left join {SCHEMA}.recounts r on r.event_seq = e.seq
join {SCHEMA}.dimensions d on d.id = coalesce(r.dimension_id, e.dimension_id)
left join lateral (select price_version from {SCHEMA}.postings
    where event_seq = e.seq order by seq desc limit 1) p on true
cross join lateral jsonb_array_elements(coalesce(r.attempts, e.attempts)) a
where e.effective_at >= :begin and e.effective_at < :end and d.requested_model = any(:routes)
and a ->> 'model' <> d.served_model
group by 1, 2, 3, 4""")


class PostgresRouteReader:
    """Safe from any thread."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def usage(self, span: TimeRange, routes: Sequence[str]) -> RouteUsage:
        """As `RouteReader.usage`."""
        given = {"begin": span.begin, "end": span.end, "routes": list(routes)}
        with reading(self._books.engine) as connection:
            answers, attempts = (
                [
                    RouteUse(
                        route,
                        ModelName(model),
                        None if version == UNPRICED else PriceVersionId(version),
                        is_batch,
                        int(requests),
                        ClassAmounts(int(uncached), int(cached), int(output)),
                        int(cost),
                    )
                    for route, model, version, is_batch, requests, uncached, cached, output, cost in (
                        connection.execute(query, given)
                    )
                ]
                for query in (_ANSWERS, _ATTEMPTS)
            )
        return RouteUsage(answers, attempts)
