"""The first keys of a new installation, written to files that only their owner can read."""

from __future__ import annotations

import os
from pathlib import Path

from footplate.tenancy.api_keys import Role, is_right_secret, make_key, parse_key
from footplate.tenancy.authenticator import PEPPER_PURPOSE
from footplate.tenancy.secrets import MasterKey
from footplate.tenancy.store import KeyStore
from footplate.tenancy.tenants import Tenant

PLATFORM_TENANT = "platform"  # owns the keys that administer; it runs no inference
DEFAULT_TENANT = "default"
FIRST_KEYS = (
    ("admin.key", PLATFORM_TENANT, Role.PLATFORM_ADMIN),
    ("tenant.key", DEFAULT_TENANT, Role.MEMBER),
    ("scrape.key", PLATFORM_TENANT, Role.SCRAPE),
)


def create_first_keys(store: KeyStore, master_key: MasterKey, folder: Path) -> dict[str, Path]:
    """Make sure that each first key's file exists and that its key is known; gives the files by name.

    Calling it again changes nothing: a file whose key the store knows is kept, even when that key was
    revoked. A missing file, or one from another database or master key, is replaced by a new key.
    """
    pepper = master_key.derive(PEPPER_PURPOSE)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    files: dict[str, Path] = {}
    for file_name, tenant_name, role in FIRST_KEYS:
        path = folder / file_name
        files[file_name] = path
        if _is_known(store, pepper, path):
            continue
        key = make_key(pepper)
        store.add_key(key, _tenant(store, tenant_name).id, role, name=path.stem)
        _write_private(path, key.text + "\n")
    return files


def _is_known(store: KeyStore, pepper: bytes, path: Path) -> bool:
    try:
        parts = parse_key(path.read_text(encoding="ascii").strip())
    except (OSError, UnicodeDecodeError):
        return False
    return parts is not None and is_right_secret(pepper, store.find_key(parts[0]), *parts)


def _tenant(store: KeyStore, name: str) -> Tenant:
    return store.find_tenant(name) or store.create_tenant(name)


def _write_private(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
