"""The HTTP client of commands that speak to a running platform."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx

from footplate.platform.cli.errors import CommandError
from footplate.platform.settings import client_environment, data_dir
from footplate.tenancy.api_keys import parse_key
from footplate.tenancy.tenants import TENANT_ID

ADMIN = "/admin/v1"
PAGE = 1000


def open_client(key_file: str) -> httpx.Client:
    """A client with FOOTPLATE_API_KEY, or else the key of that name in the data folder.

    Raises:
        CommandError: there is no key, or it has not the form of one; or FOOTPLATE_URL is no URL.
    """
    environment = client_environment()
    if environment.api_key is not None:
        key = _checked_key(environment.api_key, "FOOTPLATE_API_KEY")
    else:
        key = _first_key(key_file)
    try:
        return httpx.Client(
            base_url=environment.url,
            headers={"Authorization": f"Bearer {key}"},
            # Closing a month reads all of its events.
            timeout=httpx.Timeout(30, read=900),
        )
    except httpx.InvalidURL:
        raise CommandError("FOOTPLATE_URL is not a URL; set it to http://HOST:PORT") from None


def _first_key(key_file: str) -> str:
    path = data_dir() / "keys" / key_file
    try:
        text = path.read_bytes().decode("ascii", "replace")
    except OSError as error:
        raise CommandError(f"no key: set FOOTPLATE_API_KEY ({path}: {error.strerror})") from error
    return _checked_key(text, str(path))


def _checked_key(text: str, where: str) -> str:
    """A key without the blanks and line ends that come with pasting and with files."""
    key = text.strip()
    if parse_key(key) is None:
        # Of the text itself nothing is said: it may be most of a key.
        raise CommandError(
            f"{where} is not a key; a key reads fp_ID_SECRET, as it was shown when it was made"
        )
    return key


class AdminClient:
    """The admin API as commands use it; a context manager. Every failure is a CommandError."""

    def __init__(self) -> None:
        self._http = open_client("admin.key")

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(self, method: str, path: str, body: Any = None, **query: str | int | None) -> Any:
        """One request's answer."""
        given = {name: value for name, value in query.items() if value is not None}
        return send(self._http, method, ADMIN + path, json=body, params=given).json()

    def download(self, path: str, block_size: int = 1 << 16) -> Iterator[bytes]:
        """The body of an answer that is a file, as it comes."""
        try:
            with self._http.stream("GET", ADMIN + path) as response:
                if response.is_error:
                    response.read()
                    raise refused(response)
                yield from response.iter_bytes(block_size)
        except httpx.HTTPError as error:
            raise unreachable(error) from None

    def rows(self, path: str, *, limit: int | None = None, **query: str | int | None) -> list[dict[str, Any]]:
        """A list's rows, page by page; all of them where there is no limit."""
        found: list[dict[str, Any]] = []
        after: str | None = None
        while limit is None or len(found) < limit:
            size = PAGE if limit is None else min(PAGE, limit - len(found))
            page = self.ask("GET", path, limit=size, after=after, **query)
            found += page["data"]
            after = page["next"]
            if after is None:
                break
        return found

    def tenant_id(self, tenant: str) -> str:
        """The id of a tenant that was named by its id or its name."""
        # A name may begin as an id does.
        if TENANT_ID.fullmatch(tenant):
            return tenant
        found = self.ask("GET", "/tenants", name=tenant)["data"]
        if not found:
            raise CommandError(f"there is no tenant named {tenant!r}; 'footplate tenants list' shows them")
        return str(found[0]["id"])


def send(client: httpx.Client, method: str, path: str, **options: Any) -> httpx.Response:
    """A response that is no error.

    Raises:
        CommandError: no answer, or a refusal with the platform's own words.
    """
    try:
        response = client.request(method, path, **options)
    except httpx.HTTPError as error:
        raise unreachable(error) from None
    except (httpx.InvalidURL, UnicodeEncodeError):
        raise CommandError(
            "a text that was given can't be sent: it is not UTF-8, or stands in no URL"
        ) from None
    if response.is_error:
        raise refused(response)
    return response


def unreachable(error: httpx.HTTPError) -> CommandError:
    """What to say when nobody answers. The library's own text is kept out: it may quote a header."""
    url = client_environment().url
    return CommandError(
        f"no platform answers at {url}: {_fault(error)}; if it runs elsewhere, set FOOTPLATE_URL=http://HOST:PORT"
    )


def _fault(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    if isinstance(error, httpx.ConnectError):
        return "it can't be connected to"
    if isinstance(error, httpx.UnsupportedProtocol):
        return "the URL begins with neither http:// nor https://"
    return "the connection broke off"


def refused(response: httpx.Response) -> CommandError:
    """What the platform said, in one line."""
    try:
        error = response.json()["error"]
        where = f"{error['param']}: " if error.get("param") else ""
        return CommandError(f"{where}{error['message']} (status {response.status_code})")
    except (ValueError, KeyError, TypeError):
        return CommandError(f"the platform answered with status {response.status_code}")
