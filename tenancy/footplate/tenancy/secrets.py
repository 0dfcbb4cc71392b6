"""Every secret of the platform, derived from one master key.

Derivation is HKDF-SHA256 (RFC 5869). The master key has a version, which enters each derivation, so that a
new master key can stand beside an old one while stored hashes are moved over.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from footplate.tenancy.errors import MasterKeyError

KEY_BYTES = 32
_PREFIX = "fpmk"


def hkdf_sha256(key: bytes, info: bytes, num_bytes: int = KEY_BYTES) -> bytes:
    """Derive `num_bytes` (at most 8160) from a key that is itself random; RFC 5869 with an empty salt."""
    pseudo_random_key = hmac.digest(b"\0" * hashlib.sha256().digest_size, key, hashlib.sha256)
    block, out = b"", b""
    for counter in range(1, -(-num_bytes // 32) + 1):
        block = hmac.digest(pseudo_random_key, block + info + bytes([counter]), hashlib.sha256)
        out += block
    return out[:num_bytes]


@dataclass(frozen=True, slots=True)
class MasterKey:
    """The one secret an operator keeps. Its `repr` shows the version only."""

    version: int
    _key: bytes = field(repr=False)

    def derive(self, purpose: str) -> bytes:
        """The 32-byte secret for one purpose, such as `api-key-pepper` or `token-channel`."""
        return hkdf_sha256(self._key, f"footplate/v{self.version}/{purpose}".encode())

    def cache_scope(self, tenant_id: str) -> bytes:
        """The 16-byte scope of a tenant's cached blocks: equal for the same tenant, guessable by nobody."""
        key = self.derive("cache-scope")
        return hashlib.blake2b(tenant_id.encode(), digest_size=16, key=key).digest()

    @staticmethod
    def load(path: Path) -> MasterKey:
        """Read a master key file: `fpmk:<version>:<64 hex digits>`.

        Raises:
            MasterKeyError: there is no such file, it is malformed, or others may read it.
        """
        try:
            mode = path.stat().st_mode
            text = path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise MasterKeyError(f"the master key file {path} can't be read: {error}") from error
        if mode & 0o077:
            raise MasterKeyError(f"the master key file {path} is open to others; run: chmod 600 {path}")
        prefix, _, rest = text.partition(":")
        version, _, digits = rest.partition(":")
        try:
            key = bytes.fromhex(digits)
            if prefix != _PREFIX or len(key) != KEY_BYTES:
                raise ValueError
            return MasterKey(int(version), key)
        except ValueError:
            raise MasterKeyError(
                f"{path} holds no master key; it must read {_PREFIX}:<version>:<{2 * KEY_BYTES} hex digits>"
            ) from None

    @staticmethod
    def load_or_create(path: Path) -> MasterKey:
        """Read the master key, or make one (mode 0600) where there is no file. Safe against a second starter.

        Raises:
            MasterKeyError: see `load`; or the folder can't be written.
        """
        if not path.exists():
            text = f"{_PREFIX}:1:{secrets.token_hex(KEY_BYTES)}\n"
            try:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                _create_private(path, text)
            except FileExistsError:
                pass
            except OSError as error:
                raise MasterKeyError(f"the master key file {path} can't be made: {error}") from error
        return MasterKey.load(path)


def _create_private(path: Path, text: str) -> None:
    """Write a new file of mode 0600 that appears whole or not at all; an existing one is never replaced."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)
    finally:
        os.unlink(draft)
