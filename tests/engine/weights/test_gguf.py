"""The GGUF parser reads what is there, lazily, and refuses everything else with a LoadError."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path

import pytest

from footplate.engine.errors import LoadError
from footplate.engine.weights.gguf import GgufFile
from tests.engine.weights.gguf_files import (
    gguf_bytes,
    llama_metadata,
    llama_tensors,
    quantised_tensor,
    string,
    value,
    write_gguf,
)


@pytest.fixture(scope="module")
def whole() -> bytes:
    return gguf_bytes(llama_metadata(), llama_tensors())


def test_metadata_and_index_are_read(tmp_path: Path) -> None:
    file = GgufFile(write_gguf(tmp_path / "m.gguf", llama_metadata(), llama_tensors()))
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["tokenizer.ggml.tokens"] == ["<s>", "</s>", "é"]
    assert file.metadata["tokenizer.ggml.scores"] == [0.5, -1.0, 2.0]
    assert file.metadata.array_length("tokenizer.ggml.tokens") == 3
    assert file.metadata.array_length("general.architecture") is None
    info = file.tensor_info("blk.1.ffn_down.weight")
    assert (info.shape, info.type.name) == ((64, 96), "Q4_1")
    expected = next(t for t in llama_tensors() if t.name == info.name)
    assert file.raw(info.name).tobytes() == expected.data


def test_a_large_vocabulary_costs_little_to_open(tmp_path: Path) -> None:
    words = [f"token{index}" for index in range(200_000)]
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama", "words": words})
    begin = time.perf_counter()
    file = GgufFile(path)
    assert time.perf_counter() - begin < 0.5
    assert file.metadata["words"] == words


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "cut.gguf"
    places = [*range(0, 1500, 7), *range(1500, len(whole) - 32, 997), len(whole) - 33]
    for length in places:
        path.write_bytes(whole[:length])
        with pytest.raises(LoadError, match=r"cut\.gguf"):
            GgufFile(path)


def test_flipped_bytes_never_do_worse_than_a_load_error(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "flipped.gguf"
    generator = random.Random(5)
    header = whole.index(b"blk.1.ffn_norm.weight") + 60
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(header)] = generator.randrange(256)
        path.write_bytes(damaged)
        try:
            file = GgufFile(path)
            for name in file.tensors:
                file.raw(name)
            for key in file.metadata:
                file.metadata[key]
        except LoadError:
            pass


HUGE = 1 << 62


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "can't be opened"),
        (b"GGML" + bytes(60), "magic"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version"),
        (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "tensor count"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "metadata count"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", HUGE) + bytes(40), "metadata key 0"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("a") + struct.pack("<IQ", 8, HUGE) + bytes(9),
            "'a'",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("a") + struct.pack("<I", 99) + bytes(9), "type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("a") + struct.pack("<IIQ", 9, 6, HUGE), "'a'"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("a") + struct.pack("<IIQ", 9, 9, 1) + bytes(9),
            "array",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (string("a") + value(1)), "twice"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"\xff" + value(1), "UTF-8"),
    ],
)
def test_a_hostile_header_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(LoadError, match=message):
        GgufFile(path)


def _with_tensor(dimensions: list[int], code: int, offset: int) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + string("weight") + struct.pack("<I", len(dimensions))
    head += b"".join(struct.pack("<Q", size) for size in dimensions) + struct.pack("<IQ", code, offset)
    return head + bytes(256)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_with_tensor([8], 99, 0), "type 99"),
        (_with_tensor([], 0, 0), "0 dimensions"),
        (_with_tensor([1] * 5, 0, 0), "5 dimensions"),
        (_with_tensor([0, 8], 0, 0), "shape"),
        (_with_tensor([1 << 40, 1 << 40], 0, 0), "shape"),
        (_with_tensor([33, 2], 2, 0), "multiple of 32"),
        (_with_tensor([8], 0, 7), "multiple of 32"),
        (_with_tensor([8], 0, 1 << 40), "needs 32 bytes"),
        (_with_tensor([80], 0, 0), "needs 320 bytes"),
    ],
)
def test_a_hostile_tensor_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(LoadError, match=message):
        GgufFile(path)


def test_a_missing_file_and_a_missing_tensor_are_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="nowhere"):
        GgufFile(tmp_path / "nowhere.gguf")
    tensors = [quantised_tensor("a", "Q8_0", 2, 32), quantised_tensor("a", "Q8_0", 2, 32)]
    with pytest.raises(LoadError, match="twice"):
        GgufFile(write_gguf(tmp_path / "m.gguf", {}, tensors))
    file = GgufFile(write_gguf(tmp_path / "m.gguf", {}, tensors[:1]))
    with pytest.raises(LoadError, match="'b' is missing"):
        file.raw("b")
