"""Where one installation keeps its state, and where one run keeps its sockets."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from footplate.deployments.errors import StartupError

# Set in every process of a run; leftovers of a run that was killed are found by it.
MARK_VARIABLE = "FOOTPLATE_INSTANCE"


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The folders of one installation.

    `run_dir` is in /tmp whatever TMPDIR says, and short: a socket's path holds 107 bytes, HAProxy allows 97,
    and Serve puts a 56-letter node id between this folder and HAProxy's socket.
    """

    data_dir: Path
    run_dir: Path
    mark: str

    @staticmethod
    def of(data_dir: Path) -> RunPaths:
        """The paths that belong to a data folder; the same folder gives the same paths. Makes nothing."""
        data_dir = data_dir.expanduser().resolve()
        mark = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:8]
        return RunPaths(data_dir, Path("/tmp") / f"fp-{os.getuid()}-{mark}", mark)

    @property
    def keys_dir(self) -> Path:
        return self.data_dir / "keys"

    @property
    def postgres_dir(self) -> Path:
        return self.data_dir / "postgres"

    @property
    def postgres_socket_dir(self) -> Path:
        return self.run_dir / "pg"

    @property
    def valkey_dir(self) -> Path:
        return self.data_dir / "valkey"

    @property
    def valkey_socket(self) -> Path:
        return self.run_dir / "valkey.sock"

    @property
    def engine_journal_dir(self) -> Path:
        """What the engines have produced, by model and replica."""
        return self.data_dir / "engine-journal"

    @property
    def exports_dir(self) -> Path:
        """Files of usage that somebody has asked for."""
        return self.data_dir / "exports"

    @property
    def usage_journal_dir(self) -> Path:
        """Usage events that wait for the database, by gateway process."""
        return self.data_dir / "usage-journal"

    @property
    def log_dir(self) -> Path:
        return self.data_dir / "logs"

    @property
    def ray_dir(self) -> Path:
        return self.run_dir / "r"

    @property
    def haproxy_dir(self) -> Path:
        return self.run_dir / "h"

    @property
    def stop_file(self) -> Path:
        """Is there from the moment at which the run begins to stop."""
        return self.run_dir / "stopping"

    def make(self) -> None:
        """Make all folders, private to this user.

        Raises:
            StartupError: a folder can't be made, or someone else owns the run folder.
        """
        # A root user's database runs as another user, which must be able to pass through, not to list.
        mode = 0o711 if os.getuid() == 0 else 0o700
        try:
            for folder in (self.data_dir, self.run_dir):
                folder.mkdir(parents=True, exist_ok=True)
                if folder.stat().st_uid == os.getuid():
                    folder.chmod(mode)
            for folder in (self.keys_dir, self.log_dir, self.haproxy_dir, self.ray_dir):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StartupError(
                f"the folder {error.filename} can't be made: {error.strerror}", "choose another --data-dir"
            ) from error
        state = os.lstat(self.run_dir)
        if state.st_uid != os.getuid() or self.run_dir.is_symlink():
            raise StartupError(f"{self.run_dir} belongs to someone else", "remove it")
