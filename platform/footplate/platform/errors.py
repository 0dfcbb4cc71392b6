"""What can go wrong at the platform's edge, apart from what engines raise.

    PlatformError
    ├── SettingsError          the configuration can't be used; `faults` lists why
    ├── AuthenticationFailed   no key, or not a live one
    ├── PermissionDenied       the key is live but its role may not do this
    ├── LimitRefused           a limit of the tenant or of its key does not admit the request
    ├── MeteringUnavailable    what a request would use can't be recorded
    ├── ModelNotFound          no such model, or none that this tenant may see
    ├── BodyTooLarge           the request's body is over the limit
    ├── BodyEncoded            the request's body is compressed
    ├── BodyTooComplex         it holds too many lists, objects or values
    ├── BodyTooSlow            the request's body did not arrive in time
    ├── NoRoomForBody          the bodies of all requests take too much memory
    ├── AnswerNotRead          the client takes nothing of its answer
    ├── NotThere               no such file or batch, or another tenant's
    ├── WrongState             what is asked for does not go with how a file or batch stands
    ├── BatchStoreAway         the database of files and batches gives no answer
    │   └── BatchStoreFull     its disk has no room
    ├── FileStoreAway          the store of files' bytes gives no answer
    │   └── FileStoreFull      its disk has no room
    ├── RequestRepeated        another request came first under its Idempotency-Key
    └── UnsupportedParameter   a parameter (or value) that this version doesn't honour

`http/errors.py` turns these and the engine's into answers. Messages hold no content.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from footplate.tenancy.limiter.decisions import LimitState

if TYPE_CHECKING:
    from footplate.platform.settings_faults import Fault


class PlatformError(Exception):
    """Root of the tree; never raised itself."""


class SettingsError(PlatformError):
    """The configuration can't be used."""

    def __init__(self, message: str, faults: Sequence[Fault]) -> None:
        super().__init__(message, faults)
        self.message = message
        self.faults = faults

    def __str__(self) -> str:
        return self.message


class AuthenticationFailed(PlatformError):
    """No key was sent, or it is not a live one."""


class PermissionDenied(PlatformError):
    """The key's role may not do this."""


class LimitRefused(PlatformError):
    """A limit does not admit the request, and nothing of any limit was used.

    `code` is the API's; `retry_after_s` None: no time helps. `about`: what the limit counts.
    """

    def __init__(
        self,
        message: str,
        code: str,
        retry_after_s: int | None = None,
        *,
        about: str | None = None,
        states: tuple[LimitState, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.retry_after_s = retry_after_s
        self.about = about
        self.states = states


class MeteringUnavailable(PlatformError):
    """What a request would use can't be recorded, so it is not begun."""


class ModelNotFound(PlatformError):
    """There is no such model for this tenant."""


class BodyTooLarge(PlatformError):
    """The body is over the limit."""


class BodyEncoded(PlatformError):
    """The body is compressed, or in another encoding that is not read here."""


class BodyTooComplex(PlatformError):
    """The body holds more lists, objects or values than a request can need."""


class BodyTooSlow(PlatformError):
    """The body did not arrive in time."""


class NoRoomForBody(PlatformError):
    """The bodies of all requests, or of one tenant's, take as much memory as they may."""


class AnswerNotRead(PlatformError):
    """The client has taken nothing of its answer for too long."""


class NotThere(PlatformError):
    """There is no such file or batch for this tenant."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class WrongState(PlatformError):
    """A file or a batch is in a state that does not allow it; `code` is the API's."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class BatchStoreAway(PlatformError):
    """The database of files and batches gives no answer."""


class BatchStoreFull(BatchStoreAway):
    """The disk of the database of files and batches has no room."""


class FileStoreAway(PlatformError):
    """The store of files' bytes gives no answer, or takes no more."""


class FileStoreFull(FileStoreAway):
    """The disk of the store of files' bytes has no room."""


class RequestRepeated(PlatformError):
    """The tenant has used this Idempotency-Key; the message names the first request and what it used."""


class UnsupportedParameter(PlatformError):
    """A parameter that this version doesn't honour; `param` is its name."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message
