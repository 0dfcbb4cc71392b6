"""Keys of prefixes: equal for equal prefixes of one tenant, and out of reach for everyone else."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from footplate.engine.prefix import PrefixHasher
from tests.engine.engine_builders import Driver, make_request

TOKENS = list(range(10))


def test_one_key_for_each_full_block() -> None:
    hasher = PrefixHasher(b"key", 4)
    assert len(hasher.chain(TOKENS, b"")) == 2
    assert hasher.chain(TOKENS[:8], b"") == hasher.chain(TOKENS, b"")  # the partial block has no key
    assert hasher.chain(TOKENS[:3], b"") == []


def test_a_key_says_everything_up_to_its_blocks_end() -> None:
    hasher = PrefixHasher(b"key", 2)
    one, two = hasher.chain([1, 2, 3, 4], b""), hasher.chain([9, 2, 3, 4], b"")
    assert one[0] != two[0] and one[1] != two[1]
    assert hasher.chain([1, 2, 3, 5], b"")[0] == one[0]


def test_scopes_and_tagged_extras_never_meet() -> None:
    """FAULTS a14."""
    hasher = PrefixHasher(b"key", 2)
    roots = [
        hasher.root(b""),
        hasher.root(b"x"),
        hasher.root(b"", {"lora": "x"}),
        hasher.root(b"", {"salt": "x"}),
        hasher.root(b"x", {"salt": ""}),
        hasher.root(b"", {"lora": "x", "salt": "y"}),
        hasher.root(b"", {"lora": "xsalty"}),  # parts are length-prefixed: joins can't be forged
        hasher.root(b"salt", {"x": ""}),
        hasher.root(b"saltx"),
    ]
    assert len(set(roots)) == len(roots)
    assert hasher.root(b"", {"a": "1", "b": "2"}) == hasher.root(b"", {"b": "2", "a": "1"})


def test_keys_differ_between_secrets() -> None:
    mine, theirs = PrefixHasher(b"a" * 32, 2), PrefixHasher(b"b" * 32, 2)
    assert mine.root(b"t") != theirs.root(b"t")
    assert mine.child(b"same parent", [1, 2]) != theirs.child(b"same parent", [1, 2])


def test_keys_are_no_function_of_pythons_hash() -> None:
    """FAULTS a13: processes with different hash seeds make the same key, from the secret alone."""
    code = (
        "from footplate.engine.prefix import PrefixHasher;"
        "print(PrefixHasher(b'key', 2).chain([1, 2, 3, 4], b't')[1].hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("0", "1")
    }
    assert seen == {PrefixHasher(b"key", 2).chain([1, 2, 3, 4], b"t")[1].hex()}


@pytest.mark.parametrize(("key", "size"), [(b"k", 0), (b"k" * 65, 2)])
def test_what_can_not_be_a_hasher_is_refused(key: bytes, size: int) -> None:
    with pytest.raises(ValueError):
        PrefixHasher(key, size)


def test_tenants_do_not_share_blocks() -> None:
    driver = Driver()
    for name, tenant in (("a1", "a"), ("b1", "b"), ("a2", "a")):
        driver.add(make_request(name, 12, tenant))
        driver.run()
    cached = {d.request_id: d.cached_tokens for d in driver.deltas if d.cached_tokens}
    assert cached == {"a2": 8}  # two full blocks; the third would leave nothing to compute
