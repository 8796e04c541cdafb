"""Directories and sockets that other users cannot use.

A directory that only its owner can enter is the whole access control of the plan protocol and of flight recordings.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

_MAX_PATH_BYTES = 107
"""`sun_path` of a Unix socket holds 108 bytes, the last of them zero."""


class PathError(OSError):
    """A directory or socket cannot be used. The sentence names the path and says what to do about it."""


def private_directory(path: Path, role: str, *, parents: bool = False) -> None:
    """Create `path` with mode 0700 if it is missing, with `parents` also its parents.

    `role` names the directory in sentences. Raises PathError unless it is a real directory of this user, closed to all
    others. Two processes may call this at the same time.
    """
    try:
        path.mkdir(mode=0o700, parents=parents, exist_ok=True)
        found = path.lstat()
    except FileNotFoundError as error:
        raise PathError(f"the parent of the {role} {path} does not exist; create it first") from error
    except OSError as error:
        raise PathError(
            f"the {role} {path} cannot be created: {error.strerror}; choose one that user {os.geteuid()} may write to"
        ) from error
    if stat.S_ISLNK(found.st_mode):
        raise PathError(f"the {role} {path} is a symbolic link; name the real directory")
    if not stat.S_ISDIR(found.st_mode):
        raise PathError(f"{path} is not a directory; choose another {role}")
    if found.st_uid != os.geteuid():
        raise PathError(
            f"the {role} {path} belongs to user {found.st_uid}, this process runs as user {os.geteuid()}; choose a"
            " directory of its own"
        )
    # The permission bits alone: in a volume with an fsGroup, a new folder inherits set-group-ID, which opens nothing.
    if (mode := stat.S_IMODE(found.st_mode) & 0o777) != 0o700:
        raise PathError(f"the {role} {path} has mode {mode:04o}, it must be 0700; run: chmod 700 {path}")


def own_socket_exists(path: Path) -> bool:
    """Return whether a socket of this user is at `path`. Raises PathError if something else is there."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise PathError(f"{path} is not a socket of user {os.geteuid()}; move it elsewhere")
    return True


def remove_stale_socket(path: Path) -> None:
    """Remove the socket of an exited process at `path`. Raises PathError if something else is there."""
    if own_socket_exists(path):
        path.unlink()


@dataclass(frozen=True, slots=True)
class SocketDir:
    """The private directory of the sockets between scheduler and worker, and the names in it."""

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
