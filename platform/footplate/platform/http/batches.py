"""`/v1/batches`: many requests at half price, run when nobody else waits."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from footplate.engine.errors import InvalidRequest
from footplate.platform.batches.desk import NO_SUCH_BATCH, BatchDesk
from footplate.platform.batches.states import OVER
from footplate.platform.batches.values import WINDOW, Batch, BatchStatus, NewBatch
from footplate.platform.errors import NotThere
from footplate.platform.http.files import add_routes, read_expiry, refuse_idempotency_key
from footplate.platform.http.gateway import Gateway
from footplate.platform.http.lists import is_id, read_page, shown_list
from footplate.platform.http.schemas import Body, Metadata, parse_body

PATH = "/v1/batches"
LINE_ENDPOINTS = ("/v1/chat/completions", "/v1/completions")


class ExpiresAfter(Body):
    anchor: str
    seconds: int


class CreateBatchBody(Body):
    """`POST /v1/batches`."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=128)]
    endpoint: Annotated[str, Field(max_length=128)]
    completion_window: Annotated[str, Field(max_length=16)]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


def add_batches(app: FastAPI, gateway: Gateway, desk: BatchDesk) -> None:
    """The routes of batches."""
    routes = (
        ("POST", PATH, create_batch),
        ("GET", PATH, list_batches),
        ("GET", PATH + "/{batch_id}", show_batch),
        ("POST", PATH + "/{batch_id}/cancel", cancel_batch),
    )
    add_routes(app, gateway, desk, routes)


async def create_batch(gateway: Gateway, desk: BatchDesk, request: Request) -> Response:
    """Begin a batch of an uploaded file."""
    principal = await gateway.authenticate(request)
    gateway.admission.refuse_at_once(principal)
    refuse_idempotency_key(request)
    body = parse_body(CreateBatchBody, await request.body())
    if body.endpoint not in LINE_ENDPOINTS:
        raise InvalidRequest(f"Batches are served for {' and '.join(LINE_ENDPOINTS)} only.", "endpoint")
    if body.completion_window != WINDOW:
        raise InvalidRequest(f"The completion_window must be {WINDOW}.", "completion_window")
    expiry = body.output_expires_after
    param = "output_expires_after"
    kept_s = None if expiry is None else read_expiry(expiry.anchor, expiry.seconds, param)
    if not is_id(body.input_file_id):
        raise InvalidRequest("input_file_id must be the id of an uploaded file.", "input_file_id")
    # NUL is a character of JSON and none of PostgreSQL's.
    if any("\0" in text for pair in (body.metadata or {}).items() for text in pair):
        raise InvalidRequest("metadata may hold no NUL.", "metadata")
    new = NewBatch(
        principal.tenant_id,
        principal.key_id,
        body.endpoint,
        body.input_file_id,
        dict(body.metadata or {}),
        kept_s,
    )
    return JSONResponse(batch_fields(await desk.create_batch(new)))


async def list_batches(gateway: Gateway, desk: BatchDesk, request: Request) -> Response:
    """The tenant's batches, newest first."""
    principal = await gateway.authenticate(request)
    page = read_page(request, default=20, most=100)
    found, has_more = await desk.list_batches(principal.tenant_id, page)
    return JSONResponse(shown_list([batch_fields(batch) for batch in found], has_more))


async def show_batch(gateway: Gateway, desk: BatchDesk, request: Request) -> Response:
    """How far a batch has come."""
    principal = await gateway.authenticate(request)
    return JSONResponse(batch_fields(await desk.batch(principal.tenant_id, _batch_id(request))))


async def cancel_batch(gateway: Gateway, desk: BatchDesk, request: Request) -> Response:
    """End a batch early; what is done of it stays, and is billed."""
    principal = await gateway.authenticate(request)
    return JSONResponse(batch_fields(await desk.cancel_batch(principal.tenant_id, _batch_id(request))))


def batch_fields(batch: Batch) -> dict[str, Any]:
    """A batch as the API shows it."""
    counts = batch.counts
    stamps = {
        f"{status.value}_at": None if at is None else int(at.timestamp())
        for status in BatchStatus
        if status is not BatchStatus.VALIDATING
        for at in (batch.stamps.get(status),)
    }
    faults = [fault.fields() for fault in batch.faults]
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": faults} if faults else None,
        "input_file_id": batch.input_file_id,
        "completion_window": WINDOW,
        "status": batch.status.value,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": int(batch.created_at.timestamp()),
        "expires_at": int(batch.expires_at.timestamp()),
        **stamps,
        "request_counts": {
            "total": counts.total,
            "completed": counts.completed,
            "failed": counts.failed,
        },
        "usage": _usage(batch),
        "metadata": dict(batch.metadata) or None,
    }


def _usage(batch: Batch) -> dict[str, Any] | None:
    """What the answers used that are in the output file; None until it is there."""
    if batch.status not in OVER or batch.status is BatchStatus.FAILED:
        return None
    tokens = batch.tokens
    return {
        "input_tokens": tokens.input,
        "input_tokens_details": {"cached_tokens": tokens.cached},
        "output_tokens": tokens.output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens.input + tokens.output,
    }


def _batch_id(request: Request) -> str:
    found: str = request.path_params["batch_id"]
    if not is_id(found):
        raise NotThere(NO_SUCH_BATCH, "id")
    return found
