"""`Idempotency-Key` on requests of models: the first one under a key runs, every other is refused.

Nothing of an answer is kept, so nothing can be said again: a refusal names the first request's id, how it
ended and what it used.
"""

from __future__ import annotations

import asyncio
import logging

from footplate.billing.errors import BillingError
from footplate.billing.request_keys import FirstRequest, RequestKeys
from footplate.billing.usage import EventId, TenantId
from footplate.engine.errors import InvalidRequest
from footplate.platform.errors import MeteringUnavailable, RequestRepeated

_LOGGER = logging.getLogger(__name__)
HEADER = "Idempotency-Key"
MAX_KEY_CHARS = 255
CLAIM_S = 3.0
# What a failed release waits before it is tried again.
RELEASE_PAUSES_S = (0.1, 0.5, 2.0, 8.0)


def checked_key(text: str | None) -> str | None:
    """The header as it may be, or None without one. Raises InvalidRequest."""
    if text is None:
        return None
    if not 1 <= len(text) <= MAX_KEY_CHARS or not (text.isascii() and text.isprintable()):
        raise InvalidRequest(
            f"{HEADER} must have 1 to {MAX_KEY_CHARS} visible ASCII characters; a UUID will do.", HEADER
        )
    return text


class RequestClaims:
    """Claims keys in the database before anything runs; a request without a key asks nothing."""

    def __init__(self, keys: RequestKeys) -> None:
        self._keys = keys
        # Claims that are asked and not answered yet, by request: one may come true long after nobody waits.
        self._asking: dict[str, asyncio.Future[FirstRequest | None]] = {}

    async def claim(self, tenant_id: str, key: str, request_id: str) -> None:
        """Be the first under a key. Unless the request runs, `release` must follow, whatever comes of this.

        Raises:
            RequestRepeated: another request was.
            MeteringUnavailable: the database can't say; to run without knowing might run twice.
        """
        asked = (TenantId(tenant_id), key, EventId(request_id))
        asking = asyncio.ensure_future(asyncio.to_thread(self._keys.claim, *asked))
        self._asking[request_id] = asking
        asking.add_done_callback(lambda _: self._asking.pop(request_id, None))
        try:
            async with asyncio.timeout(CLAIM_S):
                first = await asyncio.shield(asking)
        except (BillingError, TimeoutError) as error:
            asking.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            message = f"{HEADER} can't be held to at the moment, so the request was not begun; try again."
            raise MeteringUnavailable(message) from error
        if first is None:
            return
        state = "in_progress" if first.state is None else first.state.value
        tokens = first.tokens
        raise RequestRepeated(
            f"This {HEADER} was used within 24 hours by request {first.event_id}: {state}, "
            f"{tokens.input_uncached + tokens.input_cached} input tokens ({tokens.input_cached} cached), "
            f"{tokens.output} output tokens. Nothing was run or billed again; a new request needs a new key."
        )

    async def release(self, tenant_id: str, key: str, request_id: str) -> None:
        """The request did not begin: its key may be used again. Where that can't be told it is kept."""
        asking = self._asking.get(request_id)
        if asking is not None:
            # Freed before it is taken, it would be kept for a day.
            await asyncio.wait([asking])
        for pause_s in RELEASE_PAUSES_S:
            try:
                await asyncio.to_thread(self._keys.release, TenantId(tenant_id), key, EventId(request_id))
                return
            except BillingError:
                await asyncio.sleep(pause_s)
        _LOGGER.warning("an idempotency key of a request that did not begin could not be freed")
