"""The private directory of the sockets between scheduler and worker, and the names in it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .private_dir import PathError, private_directory

_MAX_PATH_BYTES = 107
"""`sun_path` of a Unix socket holds 108 bytes, the last of them zero."""


@dataclass(frozen=True, slots=True)
class SocketDir:
    """The names in a checked directory."""

    directory: Path

    @property
    def plan(self) -> Path:
        """Scheduler to worker: plans."""
        return self.directory / "plan.sock"

    @property
    def result(self) -> Path:
        """Worker to scheduler: results, hellos, heartbeats."""
        return self.directory / "result.sock"

    @property
    def lock(self) -> Path:
        """Locked by the scheduler that uses the directory, so that a second one does not take over its sockets."""
        return self.directory / "scheduler.lock"


def private_socket_dir(directory: Path) -> SocketDir:
    """Return the sockets in `directory`, which is created (mode 0700) if it is missing; its parent is not.

    Either process may create it. Raises PathError unless the directory is private and its path short enough.
    """
    sockets = SocketDir(Path(os.path.abspath(directory)))
    for name in (sockets.plan, sockets.result):
        if (length := len(os.fsencode(name))) > _MAX_PATH_BYTES:
            raise PathError(
                f"the socket path {name} has {length} bytes, a Unix socket path may have {_MAX_PATH_BYTES}; "
                "choose a directory with a shorter path"
            )
    private_directory(sockets.directory, "socket directory")
    return sockets
