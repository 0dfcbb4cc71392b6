"""The program terraform, where it and a folder of its providers are found; nothing is ever downloaded."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2] / "infra" / "terraform"
PROVIDER = "registry.terraform.io/hashicorp/aws"


@dataclass(frozen=True, slots=True)
class Terraform:
    """Runs on a copy of the modules, so that nothing it writes lands in the repository."""

    program: str
    plugin_dir: Path
    copy: Path

    @staticmethod
    def find(scratch: Path) -> Terraform | str:
        """The program on a fresh copy, or why there is none."""
        program = shutil.which("terraform")
        if program is None:
            return "terraform is not on the path"
        plugin_dir = next((folder for folder in plugin_dirs() if (folder / PROVIDER).is_dir()), None)
        if plugin_dir is None:
            return f"no folder of plugins holds {PROVIDER} (set FOOTPLATE_TERRAFORM_PLUGINS)"
        copy = Path(shutil.copytree(ROOT, scratch / "terraform"))
        return Terraform(program, plugin_dir, copy)

    def run(self, *arguments: str, folder: str = ".") -> subprocess.CompletedProcess[str]:
        """One command in a folder below infra/terraform; never raises for what it says."""
        environment = {**os.environ, "CHECKPOINT_DISABLE": "1", "TF_IN_AUTOMATION": "1"}
        # It may name a file that isn't there; each command would warn.
        environment.pop("TF_CLI_CONFIG_FILE", None)
        return subprocess.run(
            [self.program, *arguments],
            cwd=self.copy / folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def init(self, folder: str) -> None:
        """Make a folder ready; its providers come from the plugin folder."""
        done = self.run(
            "init", "-backend=false", "-input=false", f"-plugin-dir={self.plugin_dir}", folder=folder
        )
        assert done.returncode == 0, done.stderr


def plugin_dirs() -> Iterator[Path]:
    """Where providers may lie: ours to name, terraform's own places, and mirrors that images bring."""
    named = os.environ.get("FOOTPLATE_TERRAFORM_PLUGINS")
    if named:
        yield Path(named)
    for place in (
        "~/.terraform.d",
        "~/.local/share/terraform",
        "/usr/local/share/terraform",
        "/usr/share/terraform",
    ):
        yield Path(place).expanduser() / "plugins"
    yield from sorted(Path("/opt").glob("*"))
