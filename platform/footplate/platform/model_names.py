"""What models and routes may be called: names are those of applications, and encoded those of folders."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

from pydantic import AfterValidator, Field

# A file system's limit on a name is 255 bytes; a generation's mark is added to it.
MAX_ENCODED_BYTES = 240


def _is_servable(name: str) -> str:
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError("must have something other than '.' and '..' before and after each slash")
    if (length := len(quote(name, safe=""))) > MAX_ENCODED_BYTES:
        raise ValueError(
            f"takes {length} bytes as a folder's name, {MAX_ENCODED_BYTES} are the limit; "
            "use fewer of the characters / : and @, which take three each"
        )
    return name


ModelName = Annotated[
    str,
    Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$"),
    AfterValidator(_is_servable),
]
