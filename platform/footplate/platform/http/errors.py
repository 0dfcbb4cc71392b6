"""The only place where an exception becomes a status, and the one shape that all errors have.

    {"error": {"message", "type", "param", "code"}}

Messages come from our own exceptions or stand here; nothing of a request's content, and no text of an unknown
exception, goes into them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from footplate.billing.errors import (
    BillingError,
    InvalidPrice,
    InvalidReport,
    PeriodClosed,
    PeriodNotClosable,
    PriceInForce,
)
from footplate.billing.errors import NotFound as NothingInBooks
from footplate.billing.errors import StoreUnavailable as BooksUnavailable
from footplate.engine.errors import (
    EngineDead,
    EngineError,
    EngineOverloaded,
    InvalidRequest,
    LoadError,
    RequestTooLarge,
)
from footplate.platform.errors import (
    AnswerNotRead,
    AuthenticationFailed,
    BatchStoreAway,
    BatchStoreFull,
    BodyEncoded,
    BodyTooComplex,
    BodyTooLarge,
    BodyTooSlow,
    FileStoreAway,
    FileStoreFull,
    LimitRefused,
    MeteringUnavailable,
    ModelNotFound,
    NoRoomForBody,
    NotThere,
    PermissionDenied,
    PlatformError,
    RequestRepeated,
    UnsupportedParameter,
    WrongState,
)
from footplate.platform.http.forms import WRONG_FORM
from footplate.platform.http.limit_headers import limit_headers
from footplate.tenancy.errors import (
    AccessDenied,
    Conflict,
    IdempotencyKeyReused,
    InvalidValue,
    NameTaken,
    NotFound,
    StoreUnavailable,
    TenancyError,
)

# pydantic's parser has these limits; neither can be set.
MAX_JSON_DEPTH = 200
MAX_JSON_DIGITS = 4_300
_MAX_PARAM_CHARACTERS = 128
# In one body; of more, none is described.
MAX_TOLD_FAULTS = 64
# No parameter's name is longer; an API key pasted in place of one is.
MAX_NAME_CHARACTERS = 40
_REQUEST = "invalid_request_error"
_SERVER = "server_error"


@dataclass(frozen=True, slots=True)
class ApiError:
    """An error as it goes over the wire."""

    status: int
    message: str
    type: str = _REQUEST
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def encode(self) -> bytes:
        return msgspec.json.encode(self.body())

    def response(self) -> Response:
        return Response(self.encode(), self.status, dict(self.headers), media_type="application/json")


def api_error(error: Exception) -> ApiError:
    """The answer to an exception; an unknown one is a 500 that tells nothing."""
    if isinstance(error, ValidationError):
        return _from_validation(error)
    if isinstance(error, InvalidRequest | UnsupportedParameter):
        return _from_request(error)
    if isinstance(error, EngineError):
        return _from_engine(error)
    if isinstance(error, PlatformError):
        return _from_platform(error)
    if isinstance(error, TenancyError):
        return _from_tenancy(error)
    if isinstance(error, BillingError):
        return _from_billing(error)
    if isinstance(error, HTTPException):
        return _from_framework(error)
    return ApiError(500, "The server failed to answer this request.", _SERVER, _SERVER)


def _from_request(error: InvalidRequest | UnsupportedParameter) -> ApiError:
    if isinstance(error, UnsupportedParameter):
        code = "unsupported_parameter"
    elif isinstance(error, RequestTooLarge):
        code = "context_length_exceeded"
    else:
        code = "invalid_value"
    return ApiError(400, error.message, code=code, param=error.param)


def _from_engine(error: EngineError) -> ApiError:
    if isinstance(error, EngineOverloaded):
        after = {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
        return ApiError(503, error.message, _SERVER, "server_is_overloaded", headers=after)
    if isinstance(error, EngineDead):
        message = "The model's replica stopped before the answer was complete; try again."
        return ApiError(500, message, _SERVER, _SERVER)
    if isinstance(error, LoadError):
        return ApiError(500, "The model's tokenizer can't be loaded on this server.", _SERVER, _SERVER)
    return ApiError(500, "The engine failed to answer this request.", _SERVER, _SERVER)


def _from_limit(error: LimitRefused) -> ApiError:
    """429, and whether trying again can help: the SDKs try a 429 again unless they are told not to.

    How long they are willing to wait is their own matter: a Retry-After of over a minute ends their trying.
    """
    headers = {name.decode(): value.decode() for name, value in limit_headers(error.states)}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.code == "server_is_overloaded":
        return ApiError(503, error.message, _SERVER, error.code, headers=headers)
    if error.retry_after_s is None:
        headers["x-should-retry"] = "false"
    return ApiError(429, error.message, error.about or error.code, error.code, headers=headers)


def _from_metering(error: MeteringUnavailable | RequestRepeated) -> ApiError:
    if isinstance(error, MeteringUnavailable):
        after = {"retry-after": "1"}
        return ApiError(503, str(error), _SERVER, "server_is_overloaded", headers=after)
    # SDKs try a 409 again unless they are told not to.
    again = {"x-should-retry": "false"}
    code, param = "idempotency_key_reused", "Idempotency-Key"
    return ApiError(409, str(error), code=code, param=param, headers=again)


def _from_platform(error: PlatformError) -> ApiError:
    if isinstance(error, LimitRefused):
        return _from_limit(error)
    if isinstance(error, AuthenticationFailed):
        challenge = {"www-authenticate": "Bearer"}
        return ApiError(401, str(error), code="invalid_api_key", headers=challenge)
    if isinstance(error, PermissionDenied):
        return ApiError(403, str(error), code="permission_denied")
    if isinstance(error, MeteringUnavailable | RequestRepeated):
        return _from_metering(error)
    if isinstance(error, ModelNotFound):
        return ApiError(404, str(error), code="model_not_found", param="model")
    if isinstance(error, BodyTooComplex):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, NotThere | WrongState | BatchStoreAway | FileStoreAway):
        return _from_batches(error)
    if isinstance(error, NoRoomForBody):
        after = {"retry-after": "1", "connection": "close"}
        return ApiError(503, str(error), _SERVER, "server_is_overloaded", headers=after)
    if type(error) in _UNREAD:
        status, code = _UNREAD[type(error)]
        return ApiError(status, str(error), code=code, headers={"connection": "close"})
    return ApiError(500, "The server is not set up for this request.", _SERVER, _SERVER)


def _from_batches(error: NotThere | WrongState | BatchStoreAway | FileStoreAway) -> ApiError:
    if isinstance(error, NotThere):
        return ApiError(404, str(error), code="not_found", param=error.param)
    if isinstance(error, WrongState):
        # SDKs try a 409 again unless they are told not to.
        return ApiError(409, str(error), code=error.code, headers={"x-should-retry": "false"})
    if isinstance(error, FileStoreFull | BatchStoreFull):
        message = "There is no room for files; delete some that are not needed, or tell the operator."
        return ApiError(507, message, _SERVER, "insufficient_storage", headers={"x-should-retry": "false"})
    which = "database" if isinstance(error, BatchStoreAway) else "store of files"
    message = f"The {which} can't be asked at the moment; try again."
    return ApiError(503, message, _SERVER, "server_is_overloaded", headers={"retry-after": "1"})


# What ends the connection, since the rest of a body may still come.
_UNREAD: Mapping[type[PlatformError], tuple[int, str]] = MappingProxyType(
    {
        BodyTooLarge: (413, "request_too_large"),
        BodyEncoded: (415, "unsupported_media_type"),
        BodyTooSlow: (408, "request_timeout"),
        # Never sent: the answer had begun. It only keeps a client's fault out of the server's errors.
        AnswerNotRead: (408, "request_timeout"),
    }
)


def _from_tenancy(error: TenancyError) -> ApiError:
    if isinstance(error, StoreUnavailable):
        message = "The database can't be asked at the moment; try again."
        return ApiError(503, message, _SERVER, "server_is_overloaded", headers={"retry-after": "1"})
    if isinstance(error, InvalidValue):
        return ApiError(400, _sentence(error), code="invalid_value", param=error.field)
    if isinstance(error, AccessDenied):
        return ApiError(403, _sentence(error), code="permission_denied")
    if isinstance(error, NotFound):
        return ApiError(404, _sentence(error), code="not_found")
    if isinstance(error, Conflict):
        codes: dict[type[Conflict], str] = {
            NameTaken: "name_taken",
            IdempotencyKeyReused: "idempotency_key_reused",
        }
        return ApiError(409, _sentence(error), code=codes.get(type(error), "conflict"))
    return ApiError(500, "The server failed to answer this request.", _SERVER, _SERVER)


def _from_billing(error: BillingError) -> ApiError:
    if isinstance(error, BooksUnavailable):
        message = "The books can't be asked at the moment; try again."
        return ApiError(503, message, _SERVER, "server_is_overloaded", headers={"retry-after": "1"})
    if isinstance(error, InvalidPrice | InvalidReport):
        param = error.field[:_MAX_PARAM_CHARACTERS] or None
        return ApiError(400, _without_quotes(_sentence(error)), code="invalid_value", param=param)
    if isinstance(error, NothingInBooks):
        return ApiError(404, _without_quotes(_sentence(error)), code="not_found")
    conflicts: dict[type[BillingError], str] = {
        PriceInForce: "price_in_force",
        PeriodClosed: "period_closed",
        PeriodNotClosable: "period_not_closable",
    }
    if type(error) in conflicts:
        return ApiError(409, _sentence(error), code=conflicts[type(error)])
    return ApiError(500, "The server failed to answer this request.", _SERVER, _SERVER)


# Text between quotes; an apostrophe is none.
_QUOTED = re.compile(r"""(?<!\w)(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")(?!\w)""")


def _without_quotes(text: str) -> str:
    """A sentence that commands show as it is: what was sent is quoted there, and not in an answer."""
    return _QUOTED.sub("…", text)


def _sentence(error: Exception) -> str:
    text = str(error)
    return f"{text[:1].upper()}{text[1:]}."


def _from_framework(error: HTTPException) -> ApiError:
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return ApiError(404, "There is no such URL here.", code="unknown_url", headers=headers)
    if error.status_code == 405:
        message = "This URL does not answer this method."
        return ApiError(405, message, code="method_not_allowed", headers=headers)
    return ApiError(error.status_code, "The request can't be read as HTTP.", headers=headers)


def _from_validation(error: ValidationError) -> ApiError:
    """The first fault only. Python gets all of them or none, and a small body can hold many thousands."""
    num_faults = error.error_count()
    if num_faults > MAX_TOLD_FAULTS:
        message = (
            f"{num_faults} parameters or values in the body are unknown or wrong; of so many none is named. "
            f"Up to {MAX_TOLD_FAULTS}, the first one is."
        )
        return ApiError(400, message, code="invalid_value")
    first = next(iter(error.errors(include_url=False, include_input=False)))
    kind, message = str(first["type"]), str(first["msg"]).removeprefix("Value error, ")
    if kind == "json_invalid":
        return _from_json(str(first["ctx"]["error"]))
    param = _param(first["loc"])
    if kind == "extra_forbidden":
        message = "This parameter is not known, or not supported here."
        return ApiError(400, message, code="unsupported_parameter", param=param)
    if kind == "missing":
        return ApiError(400, "This parameter is required.", code="missing_required_parameter", param=param)
    if kind == "value_error":
        message = _without_quotes(message)
    if kind not in _SAFE_KINDS:
        message = "This parameter has the wrong type or form."
    return ApiError(400, f"{message}." if message[-1:] != "." else message, code="invalid_value", param=param)


def _from_json(fault: str) -> ApiError:
    """What the parser can't read, and what it reads no further, though it may be valid JSON."""
    if fault.startswith("recursion limit"):
        return ApiError(400, f"The body nests deeper than {MAX_JSON_DEPTH} levels.", code="invalid_value")
    if fault.startswith("number out of range"):
        message = f"A number in the body is too large: it has more than {MAX_JSON_DIGITS} digits."
        return ApiError(400, message, code="invalid_value")
    return ApiError(400, "The body is not valid JSON in UTF-8.", code="invalid_json")


# Kinds whose sentences speak of the expectation only, never of what was sent.
_SAFE_KINDS = frozenset(
    {
        *(WRONG_FORM, "value_error", "greater_than_equal", "less_than_equal", "greater_than", "less_than"),
        *("int_type", "float_type", "string_type", "bool_type", "list_type", "dict_type", "tuple_type"),
        *("finite_number", "literal_error", "too_long", "too_short", "string_too_long", "string_too_short"),
        *("model_type", "model_attributes_type", "int_parsing_size", "string_unicode"),
    }
)

# Parts of a location that name a branch of a type, not a field of the request.
_BRANCHES = ("list[", "dict[", "function-", "constrained-", "json-", "nullable")
_FREE_KEYS = frozenset({"metadata", "logit_bias", "labels", "per_model"})
_BRANCH_TYPES = frozenset({"str", "int", "float", "bool", "[key]"})


def _param(location: tuple[int | str, ...]) -> str | None:
    name, is_key_passed = "", False
    for part in location[:6]:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part not in _BRANCH_TYPES and not part.startswith(_BRANCHES):
            # Keys that clients choose are content, and so is a name that no parameter could have.
            if name in _FREE_KEYS and not is_key_passed:
                is_key_passed = True
                continue
            if not part.isidentifier() or len(part) > MAX_NAME_CHARACTERS:
                break
            name += f".{part}" if name else part
    return name[:_MAX_PARAM_CHARACTERS] or None
