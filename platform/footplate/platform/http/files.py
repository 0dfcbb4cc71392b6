"""`/v1/files`: uploaded piece by piece, kept for their tenant, read back as they were."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from footplate.engine.errors import InvalidRequest
from footplate.platform.batches.desk import NO_SUCH_FILE, BatchDesk, Upload
from footplate.platform.batches.store import NewFile
from footplate.platform.batches.values import (
    BATCH_FILE_S,
    BATCH_PURPOSE,
    OUTPUT_PURPOSE,
    FileLimits,
    StoredFile,
)
from footplate.platform.errors import BodyTooLarge, NotThere, UnsupportedParameter
from footplate.platform.http.edge import EdgeLimits
from footplate.platform.http.gateway import Gateway
from footplate.platform.http.lists import is_id, read_page, shown_list
from footplate.platform.http.multipart import MultipartParser, PartBegin, PartEnd, boundary_of
from footplate.platform.idempotency import HEADER

PATH = "/v1/files"
MAX_FIELD_BYTES = 1_000
MAX_NAME_CHARACTERS = 255
PIECE_BYTES = 1 << 20
MIN_KEPT_S, MAX_KEPT_S = 3_600, 2_592_000
# What stands around the file in the form.
_FORM_BYTES = 1 << 20
# A slow line may take a while for 200 MB.
UPLOAD_LIMITS: Mapping[tuple[str, str], EdgeLimits] = MappingProxyType(
    {
        ("POST", PATH): EdgeLimits(
            max_body_bytes=FileLimits().max_file_bytes + _FORM_BYTES, max_body_s=900.0, is_held=False
        )
    }
)
_OTHER_PURPOSES = frozenset({"assistants", "fine-tune", "vision", "user_data", "evals"})
_FIELDS = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})
_Handler = Callable[[Gateway, BatchDesk, Request], Awaitable[Response]]


def add_files(app: FastAPI, gateway: Gateway, desk: BatchDesk) -> None:
    """The routes of files."""
    routes: tuple[tuple[str, str, _Handler], ...] = (
        ("POST", PATH, create_file),
        ("GET", PATH, list_files),
        ("GET", PATH + "/{file_id}", show_file),
        ("GET", PATH + "/{file_id}/content", show_content),
        ("DELETE", PATH + "/{file_id}", delete_file),
    )
    add_routes(app, gateway, desk, routes)


def add_routes(
    app: FastAPI, gateway: Gateway, desk: BatchDesk, routes: tuple[tuple[str, str, _Handler], ...]
) -> None:
    """Bind handlers to the parts that they work with."""

    def bound(handler: _Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                return await handler(gateway, desk, request)
            except ClientDisconnect:
                return Response(status_code=400)  # nobody is there to read it

        return answer

    for method, path, handler in routes:
        app.add_api_route(
            path, bound(handler), methods=[method], name=handler.__name__, summary=handler.__doc__
        )


async def create_file(gateway: Gateway, desk: BatchDesk, request: Request) -> Response:
    """Upload a file: multipart/form-data with `purpose` and `file`, in any order."""
    principal = await gateway.authenticate(request)
    refuse_idempotency_key(request)
    parser = MultipartParser(boundary_of(request.headers.get("content-type", "")))
    form = _Form(desk, principal.tenant_id)
    try:
        async for piece in request.stream():
            for event in parser.feed(piece):
                if isinstance(event, PartBegin):
                    await form.begin(event)
                elif isinstance(event, PartEnd):
                    await form.end()
                else:
                    await form.take(event)
        parser.close()
        return JSONResponse(file_fields(await form.finish()))
    finally:
        await form.close()


async def list_files(gateway: Gateway, desk: BatchDesk, request: Request) -> Response:
    """The tenant's files, newest first unless `order=asc`."""
    principal = await gateway.authenticate(request)
    page = read_page(request, default=10_000, most=10_000, others=frozenset({"order", "purpose"}))
    purpose = request.query_params.get("purpose")
    if purpose is not None and purpose not in {BATCH_PURPOSE, OUTPUT_PURPOSE, *_OTHER_PURPOSES}:
        raise InvalidRequest("purpose must be batch or batch_output.", "purpose")
    files, has_more = await desk.list_files(principal.tenant_id, page, purpose)
    return JSONResponse(shown_list([file_fields(file) for file in files], has_more))


async def show_file(gateway: Gateway, desk: BatchDesk, request: Request) -> Response:
    """What is known of a file."""
    principal = await gateway.authenticate(request)
    return JSONResponse(file_fields(await desk.file(principal.tenant_id, _file_id(request))))


async def show_content(gateway: Gateway, desk: BatchDesk, request: Request) -> Response:
    """A file's bytes."""
    principal = await gateway.authenticate(request)
    file, pieces = await desk.content(principal.tenant_id, _file_id(request))
    headers = {"content-length": str(file.num_bytes), "cache-control": "no-store"}
    return StreamingResponse(pieces, headers=headers, media_type="application/octet-stream")


async def delete_file(gateway: Gateway, desk: BatchDesk, request: Request) -> Response:
    """Delete a file; 409 while a batch that is not over reads it."""
    principal = await gateway.authenticate(request)
    file_id = _file_id(request)
    await desk.delete_file(principal.tenant_id, file_id)
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


def file_fields(file: StoredFile) -> dict[str, Any]:
    """A file as the API shows it."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": int(file.created_at.timestamp()),
        "expires_at": None if file.expires_at is None else int(file.expires_at.timestamp()),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def read_expiry(anchor: Any, seconds: Any, param: str) -> int:
    """How long a file is kept. Raises InvalidRequest."""
    if anchor != "created_at":
        raise InvalidRequest("The anchor must be created_at.", f"{param}.anchor")
    if not (isinstance(seconds, int) and MIN_KEPT_S <= seconds <= MAX_KEPT_S):
        raise InvalidRequest(f"seconds must be from {MIN_KEPT_S} to {MAX_KEPT_S}.", f"{param}.seconds")
    return seconds


def refuse_idempotency_key(request: Request) -> None:
    """Raises UnsupportedParameter rather than let a client believe that a repeat would do nothing."""
    if HEADER.lower() in request.headers:
        message = f"{HEADER} is not supported here: list what is there before you send it again."
        raise UnsupportedParameter(message, HEADER)


def _file_id(request: Request) -> str:
    found: str = request.path_params["file_id"]
    if not is_id(found):
        raise NotThere(NO_SUCH_FILE, "id")
    return found


@dataclass(slots=True, eq=False)
class _Form:
    """The form as it comes: small fields in memory, the file on its way to the store."""

    desk: BatchDesk
    tenant_id: str
    fields: dict[str, bytearray] = field(default_factory=dict)
    filename: str | None = None
    upload: Upload | None = None
    _gathered: bytearray = field(default_factory=bytearray)
    # Of the part that comes now; None: it is the file.
    _field: bytearray | None = None
    _is_done: bool = False

    async def begin(self, part: PartBegin) -> None:
        if part.name == "file":
            if self.upload is not None:
                raise InvalidRequest("The form holds two files; send one at a time.", "file")
            self._field = None
            self.filename = _clean_name(part.filename)
            # What it is for may come behind it.
            self.upload = await self.desk.begin_upload(NewFile(self.tenant_id, "", self.filename))
            return
        if part.name not in _FIELDS:
            raise UnsupportedParameter("The form holds a field that is not known here.", "form")
        if part.name in self.fields:
            raise InvalidRequest("The form holds a field twice.", part.name)
        self._field = self.fields[part.name] = bytearray()

    async def take(self, data: bytes) -> None:
        if self._field is not None:
            self._field += data
            if len(self._field) > MAX_FIELD_BYTES:
                raise InvalidRequest("A field of the form is too long.", "form")
            return
        self._gathered += data
        assert self.upload is not None
        most = self.desk.limits.max_file_bytes
        if self.upload.num_bytes + len(self._gathered) > most:
            raise BodyTooLarge(f"The file is larger than {most} bytes; split it.")
        if len(self._gathered) >= PIECE_BYTES:
            await self._pass_on()

    async def end(self) -> None:
        if self._field is None:
            await self._pass_on()

    async def finish(self) -> StoredFile:
        purpose = self._text("purpose")
        if self.upload is None:
            raise InvalidRequest("The form needs a file.", "file")
        if purpose is None:
            raise InvalidRequest("The form needs a purpose; it must be batch.", "purpose")
        if purpose != BATCH_PURPOSE:
            raise InvalidRequest("Only files with the purpose batch are kept here.", "purpose")
        new = NewFile(self.tenant_id, purpose, self.filename or "file", self._kept_s())
        found = await self.upload.finish(new)
        self._is_done = True
        return found

    async def close(self) -> None:
        if self.upload is not None and not self._is_done:
            await self.upload.abort()

    async def _pass_on(self) -> None:
        assert self.upload is not None
        data, self._gathered = bytes(self._gathered), bytearray()
        await self.upload.write(data)

    def _kept_s(self) -> int:
        anchor, seconds = self._text("expires_after[anchor]"), self._text("expires_after[seconds]")
        if anchor is None and seconds is None:
            return BATCH_FILE_S
        is_number = seconds is not None and seconds.isascii() and seconds.isdecimal() and len(seconds) < 10
        return read_expiry(anchor, int(seconds or 0) if is_number else None, "expires_after")

    def _text(self, name: str) -> str | None:
        found = self.fields.get(name)
        return None if found is None else found.decode("utf-8", "replace")


def _clean_name(name: str | None) -> str:
    """A file's name without folders and without what nobody sees."""
    bare = (name or "").replace("\\", "/").rpartition("/")[2]
    return "".join(c for c in bare if c.isprintable())[:MAX_NAME_CHARACTERS] or "file"
