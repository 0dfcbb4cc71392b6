"""Outside programs in environments of their own, kept outside the repository between runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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
