"""The private socket directory: refusals, their sentences, and removal of stale sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.engine_harness import ENVIRONMENT
from support.time_limits import PATIENCE_SECONDS

from lineclear.process.private_dir import PathError, private_socket_dir
from lineclear.scheduler.engine.worker_link import WorkerLink


@pytest.mark.parametrize("mode", [0o700, 0o777, 0o1777, 0o2777], ids=["compose", "emptyDir", "/tmp", "with fsGroup"])
def test_a_missing_directory_is_made_private_in_any_volume(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    sockets = private_socket_dir(folder / "run")
    assert (folder / "run").stat().st_mode & 0o7777 == 0o700 | mode & 0o2000
    assert sockets.plan.parent == sockets.result.parent == folder / "run"
    assert private_socket_dir(folder / "run") == sockets  # as the process in the second container does


@pytest.mark.parametrize("mode", [0o701, 0o770, 0o777])
def test_a_directory_open_to_others_is_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    with pytest.raises(PathError, match=f"mode {mode:04o}.*chmod 700 {folder}"):
        private_socket_dir(folder)
    folder.chmod(0o700)


def test_a_symbolic_link_is_refused(folder: Path) -> None:
    (folder / "real").mkdir(mode=0o700)
    (folder / "link").symlink_to(folder / "real")
    (folder / "file").write_text("")
    with pytest.raises(PathError, match=r"link is a symbolic link"):
        private_socket_dir(folder / "link")
    with pytest.raises(PathError, match="file"):
        private_socket_dir(folder / "file")


def test_a_missing_parent_is_named(folder: Path) -> None:
    with pytest.raises(PathError, match=r"parent of the socket directory .*/missing/run does not exist"):
        private_socket_dir(folder / "missing" / "run")


def test_a_path_too_long_for_a_socket_is_refused(folder: Path) -> None:
    longest = 107 - len(str(folder)) - len("//result.sock")
    private_socket_dir(folder / ("d" * longest))
    with pytest.raises(PathError, match=r"has 108 bytes.*may have 107"):
        private_socket_dir(folder / ("d" * (longest + 1)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_directory_of_another_user_is_refused(folder: Path) -> None:
    (folder / "theirs").mkdir(mode=0o700)
    os.chown(folder / "theirs", 12345, -1)
    with pytest.raises(PathError, match="belongs to user 12345"):
        private_socket_dir(folder / "theirs")


def test_sockets_of_a_dead_scheduler_are_cleared_away(folder: Path) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(folder / "plan.sock"))
    stale.close()  # the file stays, as after kill -9
    link = WorkerLink(folder)
    assert {p.name for p in folder.iterdir()} == {"plan.sock", "result.sock", "scheduler.lock"}
    link.close()
    assert {p.name for p in folder.iterdir()} == {"scheduler.lock"}


def test_second_scheduler_in_a_directory_is_refused(folder: Path) -> None:
    link = WorkerLink(folder)
    before = (folder / "plan.sock").stat().st_ino
    with pytest.raises(PathError, match="another scheduler uses"):
        WorkerLink(folder)
    assert (folder / "plan.sock").stat().st_ino == before
    link.close()
    WorkerLink(folder).close()


def test_a_file_in_the_place_of_a_socket_is_not_deleted(folder: Path) -> None:
    for name in ("plan.sock", "result.sock"):
        (folder / name).write_text("precious")
        with pytest.raises(PathError, match=f"{name} is not a socket"):
            WorkerLink(folder)
        assert (folder / name).read_text() == "precious"
        (folder / name).unlink()
    WorkerLink(folder).close()


def test_a_link_leaves_no_descriptor_behind(folder: Path) -> None:
    WorkerLink(folder).close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        link = WorkerLink(folder)
        link.close()
        link.close()
        link.wake()
        (folder / "result.sock").mkdir()
        with pytest.raises(PathError):
            WorkerLink(folder)
        (folder / "result.sock").rmdir()
    assert len(os.listdir("/proc/self/fd")) == before


def test_dropped_link_releases_its_sockets(folder: Path) -> None:
    """In a child process, because a collection that waits for the link's sockets would block forever."""
    program = f"""
import gc, os, pathlib
from lineclear.scheduler.engine.worker_link import WorkerLink
folder = pathlib.Path({str(folder)!r})
WorkerLink(folder).close()
before = len(os.listdir("/proc/self/fd"))
def forget():
    link = WorkerLink(folder)
    link.itself = link  # only a collection finds it
forget()
gc.collect()
print(len(os.listdir("/proc/self/fd")) - before, sorted(os.listdir(folder)))
WorkerLink(folder).close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_SECONDS
    )
    assert (done.returncode, done.stdout) == (0, "0 ['scheduler.lock']\n")
