"""Safetensors files: read as the format's own library reads them, and refused when they do not add up."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from footplate.engine.errors import LoadError
from footplate.engine.kernels.linear import dense
from footplate.engine.kernels.linear.dense import DenseLinear
from footplate.engine.weights import streaming
from footplate.engine.weights.model_config import config_from_json
from footplate.engine.weights.safetensors import MAX_HEADER_BYTES, read_folder, read_header
from footplate.engine.weights.source import ModelSource
from footplate.engine.weights.streaming import Placement, stream
from footplate.engine.weights.tensor_names import hf_names, tensor_shapes
from footplate.engine.weights.weight_source import open_model
from tests.engine.weights.test_model_config import LLAMA

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A file of any header, also a senseless one."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [(end - begin) // 4] if shape is None else shape,
        "data_offsets": [begin, end],
    }


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few elements each, so that tensors are cut, and cuts fall anywhere."""
    monkeypatch.setattr(streaming, "SLICE", 44)


def shards(folder: Path, count: int = 3) -> dict[str, Path]:
    """Random tensors of every float type in several files; where each lies."""
    torch.manual_seed(5)
    where = {}
    for shard in range(count):
        tensors = {
            f"t{shard}.{i}": torch.randn(7 + shard, 5 * i + 3).to(FLOATS[(shard + i) % 3]) for i in range(6)
        }
        path = folder / f"part-{shard}.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, path)
    index = {"weight_map": {name: path.name for name, path in where.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return where


@pytest.mark.parametrize("dtype", [None, *FLOATS])
def test_tensors_are_what_the_formats_own_library_reads(
    tmp_path: Path, small_slices: None, dtype: torch.dtype | None
) -> None:
    where, found = shards(tmp_path), read_folder(tmp_path)
    assert {name: stored.path for name, stored in found.items()} == where
    want = {k: v for path in set(where.values()) for k, v in load_file(path).items()}
    got = {name: torch.full(want[name].shape, 7.0, dtype=dtype or want[name].dtype) for name in found}
    stream([Placement(stored, got[name]) for name, stored in found.items()])
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor.to(got[name].dtype)), name


def test_values_are_rounded_and_added_to_on_the_way(tmp_path: Path, small_slices: None) -> None:
    values = torch.randn(9, 31)
    save_file({"x": values}, tmp_path / "model.safetensors")
    stored = read_folder(tmp_path)["x"]
    rounded, shifted = torch.empty(9, 31), torch.empty(9 * 31)
    stream([Placement(stored, rounded, torch.bfloat16), Placement(stored, shifted, added=1.0)])
    assert torch.equal(rounded, values.bfloat16().float())
    assert torch.equal(shifted, (values + 1).flatten())


def test_a_stack_is_filled_part_by_part_and_nothing_beside_it(tmp_path: Path, small_slices: None) -> None:
    parts = {name: torch.randn(rows, 13) for name, rows in (("q", 8), ("k", 3), ("v", 3))}
    save_file(parts, tmp_path / "model.safetensors")
    found, whole = read_folder(tmp_path), torch.full((16, 13), 9.0)
    places = {"q": whole[1:9], "k": whole[9:12], "v": whole[12:15]}
    stream([Placement(found[name], places[name]) for name in parts])
    assert torch.equal(whole[1:15], torch.cat(list(parts.values())))
    assert (whole[0] == 9).all() and (whole[15] == 9).all()


def test_memory_beside_the_tensors_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SLICE", 1 << 10)
    made: list[Any] = []
    plain = streaming._Buffer

    def counted(**options: bool) -> Any:
        made.append(plain(**options))
        return made[-1]

    monkeypatch.setattr(streaming, "_Buffer", counted)
    save_file({"x": torch.randn(100_000)}, tmp_path / "model.safetensors")
    target = torch.empty(100_000, dtype=torch.bfloat16)
    stream([Placement(read_folder(tmp_path)["x"], target)])
    assert 0 < len(made) <= 2 * streaming.MAX_READERS
    assert all(buffer.memory.nbytes == 1 << 10 for buffer in made)


def change(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def replace_file(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    other.replace(path)


@pytest.mark.parametrize("harm", [change, replace_file, Path.unlink])
def test_a_file_changed_after_its_header_was_read_is_refused(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    save_file({"x": torch.randn(1000)}, tmp_path / "model.safetensors")
    stored = read_folder(tmp_path)["x"]
    harm(tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"model\.safetensors: (was changed|can't be read)"):
        stream([Placement(stored, torch.empty(1000))])


def test_one_readers_fault_ends_all_and_leaves_no_thread(
    tmp_path: Path, small_slices: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that shrinks while it is read: the state was checked, the bytes are gone."""
    where, found = shards(tmp_path), read_folder(tmp_path)
    assert where
    read, count = streaming._read, iter(range(10_000))

    def failing(descriptor: int, into: torch.Tensor, part: Any) -> None:
        if next(count) == 20:
            raise LoadError("cut short")
        read(descriptor, into, part)

    monkeypatch.setattr(streaming, "_read", failing)
    with pytest.raises(LoadError, match="cut short"):
        stream([Placement(s, torch.empty(s.shape, dtype=torch.float32)) for s in found.values()])
    assert next(count) < 20 + 2 * streaming.MAX_READERS
    assert not [t for t in threading.enumerate() if t.name.startswith("footplate-weights")]


def test_a_read_that_ends_early_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"x": torch.randn(1000)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(streaming.os, "preadv", lambda descriptor, views, offset: 0)
    with pytest.raises(LoadError, match="ends at byte"):
        stream([Placement(read_folder(tmp_path)["x"], torch.empty(1000))])


GOOD = {"a": entry(0, 8), "b": entry(8, 20)}
DEEP = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
FAULTY: dict[str, tuple[Any, bytes, str]] = {
    "overlap": ({"a": entry(0, 8), "b": entry(4, 16)}, bytes(16), "overlaps"),
    "the same bytes": ({"a": entry(0, 8), "b": entry(0, 8)}, bytes(8), "overlaps"),
    "hole": ({"a": entry(0, 8), "b": entry(12, 20)}, bytes(20), "nobody's"),
    "hole at the front": ({"a": entry(4, 8)}, bytes(8), "nobody's"),
    "cut short": (GOOD, bytes(19), "cut short"),
    "bytes left over": (GOOD, bytes(21), "nobody's"),
    "offsets turned": ({"a": entry(8, 0, [2])}, bytes(8), "data_offsets"),
    "negative": ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, bytes(8), "data_offsets"),
    "shape and bytes differ": ({"a": entry(0, 8, [3])}, bytes(8), "takes 12 bytes"),
    "product of a bomb": ({"a": entry(0, 8, [1 << 40, 1 << 40])}, bytes(8), "takes"),
    "huge count": ({"a": entry(0, 8, [1 << 70])}, bytes(8), "no shape"),
    "many dimensions": ({"a": entry(0, 4, [1] * 9)}, bytes(4), "no shape"),
    "a truth for a count": ({"a": entry(0, 4, [True])}, bytes(4), "no shape"),
    "a broken number": ({"a": entry(0, 4, [1.0])}, bytes(4), "no shape"),  # type: ignore[list-item]
    "unknown type": ({"a": entry(0, 4, [1], "F31")}, bytes(4), "unknown type"),
    "a list for a type": ({"a": {**entry(0, 4), "dtype": ["F32"]}}, bytes(4), "unknown type"),
    "a field too many": ({"a": {**entry(0, 4), "x": 1}}, bytes(4), "nothing else"),
    "a field too few": ({"a": {"dtype": "F32", "shape": [1]}}, bytes(4), "nothing else"),
    "no object": ({"a": 3}, b"", "nothing else"),
    "metadata": ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
    "a name twice": (b'{"a": 1, "a": 2}', b"", "stands twice"),
    "a list": (b"[1]", b"", "no JSON object"),
    "no JSON": (b'{"a": ', b"", "can't be read"),
    "no text": (b"{\xff\xff}", b"", "can't be read"),
    "deep": (DEEP, b"", "can't be read"),
    "a number of many digits": (b'{"a": ' + b"9" * 10_000 + b"}", b"", "can't be read"),
}


@pytest.mark.parametrize("name", FAULTY)
def test_headers_that_do_not_add_up_are_refused(tmp_path: Path, name: str) -> None:
    header, data, message = FAULTY[name]
    with pytest.raises(LoadError, match=message):
        read_header(write(tmp_path / "m.safetensors", header, data))


@pytest.mark.parametrize("length", [1 << 62, MAX_HEADER_BYTES + 1, 200])
def test_a_headers_length_is_checked_before_it_is_read(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "m.safetensors", GOOD, bytes(20), length)
    with path.open("ab") as file:
        file.truncate(8 + 190 if length == 200 else MAX_HEADER_BYTES + 100)
    with pytest.raises(LoadError, match="a header of"):
        read_header(path)


def test_a_file_of_a_few_bytes_is_none(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(b"1234567")
    with pytest.raises(LoadError, match="7 bytes"):
        read_header(tmp_path / "m.safetensors")


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    where = {name: path.name for name, path in shards(tmp_path).items()}
    index = tmp_path / "model.safetensors.index.json"
    moved = where | {"t0.0": "part-1.safetensors"}
    for weight_map, message in (
        (where | {"t9": "part-1.safetensors"}, r"'t9' is not in part-1"),
        (moved, r"'t0\.0' is not in part-1"),
        ({n: p for n, p in where.items() if n != "t0.0"}, r"'t0\.0' of part-0\.safetensors is not listed"),
        ({}, "weight_map is empty"),
        ({"t": "../part-0.safetensors"}, "outside its folder"),
        ({"t": ".."}, "outside its folder"),
        ({"t": 3}, "outside its folder"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(LoadError, match=message):
            read_folder(tmp_path)
    index.write_text('{"weight_map": {"a": "x", "a": "y"}}')
    with pytest.raises(LoadError, match="stands twice"):
        read_folder(tmp_path)
    (tmp_path / "part-9.safetensors").write_bytes((tmp_path / "part-0.safetensors").read_bytes())
    twice = where | {"t9": "part-9.safetensors"}
    index.write_text(json.dumps({"weight_map": twice}))
    with pytest.raises(LoadError, match="stands in two shards"):
        read_folder(tmp_path)


def hf_folder(folder: Path, *, tied: bool, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    (folder / "config.json").write_text(json.dumps(LLAMA | {"tie_word_embeddings": tied}))
    config = config_from_json(folder / "config.json")
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in tensor_shapes(config).items()}
    save_file({hf_names(config)[n]: t for n, t in tensors.items()}, folder / "model.safetensors")
    return tensors


def test_integers_are_no_weights(tmp_path: Path) -> None:
    hf_folder(tmp_path, tied=True, dtype=torch.int32)
    with pytest.raises(LoadError, match="is I32; F32, F16 or BF16 is needed"):
        open_model(ModelSource("hf", tmp_path, "hf"))


def test_a_tied_head_is_the_embeddings_memory_and_its_copy_in_the_file_is_ignored(tmp_path: Path) -> None:
    tensors = hf_folder(tmp_path, tied=True)
    with_copy = load_file(tmp_path / "model.safetensors")
    save_file(
        with_copy | {"lm_head.weight": torch.zeros_like(tensors["embed"])}, tmp_path / "model.safetensors"
    )
    _, weights = open_model(ModelSource("hf", tmp_path, "hf"))
    table, head = weights.embedding(), weights.linear(["head"])
    weights.complete()
    assert isinstance(head, DenseLinear) and head.weight.data_ptr() == table.weight.data_ptr()  # type: ignore[attr-defined]
    assert torch.equal(head.weight, tensors["embed"])


@pytest.mark.parametrize("tied", [True, False])
def test_an_emulated_type_multiplies_with_the_rounded_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    """There the product reads a float32 copy, which must be the one that is filled."""
    monkeypatch.setattr(dense, "_is_emulated", lambda weight: weight.dtype is torch.bfloat16)
    tensors = hf_folder(tmp_path, tied=tied)
    _, weights = open_model(ModelSource("hf", tmp_path, "hf"))
    table = weights.embedding(torch.bfloat16)
    made = {n: weights.linear(n, torch.bfloat16) for n in (("head",), ("layers.0.q", "layers.0.k"))}
    weights.complete()
    tensors.setdefault("head", tensors["embed"])
    assert torch.equal(table.weight, tensors["embed"].bfloat16())  # type: ignore[attr-defined]
    for names, linear in made.items():
        want = torch.cat([tensors[name] for name in names]).bfloat16()
        assert isinstance(linear, DenseLinear) and linear.weight.dtype is torch.float32
        assert torch.equal(linear.weight, want.float())
