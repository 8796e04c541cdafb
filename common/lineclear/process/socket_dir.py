"""The private directory in which scheduler and worker meet, and the names in it.

Decides whether a directory can be trusted and where the sockets lie. Opens no socket: that is the business of the two
links. A directory that only its owner can enter is the whole access control of the plan protocol.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

_MAX_PATH_BYTES = 107
"""`sun_path` of a Unix socket holds 108 bytes, the last of them zero."""


class SocketError(Exception):
    """The directory, or something in it, cannot be used. The sentence names the path and says what to do about it."""


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
        """Held by the scheduler that is bound here, so that a second one does not take its sockets away."""
        return self.directory / "scheduler.lock"


def private_socket_dir(directory: Path) -> SocketDir:
    """The sockets in `directory`, which is created (mode 0700) if it is missing; its parent is not.

    Raises SocketError unless it is a real directory, ours, closed to everybody else, and short enough for a socket
    path. Either process may come first.
    """
    path = Path(os.path.abspath(directory))
    sockets = SocketDir(path)
    for name in (sockets.plan, sockets.result):
        if (length := len(os.fsencode(name))) > _MAX_PATH_BYTES:
            raise SocketError(
                f"the socket path {name} has {length} bytes, a Unix socket path may have {_MAX_PATH_BYTES}; "
                "choose a directory with a shorter path"
            )
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except FileNotFoundError as error:
        raise SocketError(f"the parent of the socket directory {path} does not exist; create it first") from error
    except OSError as error:
        raise SocketError(
            f"the socket directory {path} cannot be created: {error.strerror}; choose one in a place that user "
            f"{os.geteuid()} may write to"
        ) from error
    _check(path, found)
    return sockets


def _check(path: Path, found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise SocketError(f"the socket directory {path} is a symbolic link; name the real directory")
    if not stat.S_ISDIR(found.st_mode):
        raise SocketError(f"{path} is not a directory; choose another socket directory")
    if found.st_uid != os.geteuid():
        raise SocketError(
            f"the socket directory {path} belongs to user {found.st_uid}, this process runs as user {os.geteuid()}; "
            "choose a directory of its own"
        )
    # The permission bits alone: in a volume with an fsGroup a new folder inherits set-group-ID, which opens nothing.
    if (mode := stat.S_IMODE(found.st_mode) & 0o777) != 0o700:
        raise SocketError(f"the socket directory {path} has mode {mode:04o}, it must be 0700; run: chmod 700 {path}")


def unlink_stale(path: Path) -> None:
    """Remove a socket that a dead process left at `path`. Raises SocketError for anything that is not our socket."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise SocketError(f"{path} is in the way and is not a socket of user {os.geteuid()}; move it elsewhere")
    path.unlink()
