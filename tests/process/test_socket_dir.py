"""The private socket directory: refusals, their sentences, and removal of stale sockets."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engine_harness import ENVIRONMENT, short_directory
from support.time_limits import PATIENCE_SECONDS

from lineclear.process.private_dir import PathError
from lineclear.process.socket_dir import private_socket_dir
from lineclear.scheduler.engine.worker_link import WorkerLink


@pytest.fixture
def root() -> Iterator[Path]:
    path = short_directory()
    yield path
    shutil.rmtree(path)


def test_a_missing_directory_is_made_private(root: Path) -> None:
    sockets = private_socket_dir(root / "run")
    assert (root / "run").stat().st_mode & 0o7777 == 0o700
    assert sockets.plan.parent == sockets.result.parent == root / "run"


def test_a_private_directory_is_taken_as_it_is(root: Path) -> None:
    assert private_socket_dir(root) == private_socket_dir(root)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o777])
def test_a_directory_open_to_others_is_refused(root: Path, mode: int) -> None:
    root.chmod(mode)
    with pytest.raises(PathError, match=f"mode {mode:04o}.*chmod 700 {root}"):
        private_socket_dir(root)
    root.chmod(0o700)


def test_a_symbolic_link_is_refused(root: Path) -> None:
    (root / "real").mkdir(mode=0o700)
    (root / "link").symlink_to(root / "real")
    with pytest.raises(PathError, match=r"link is a symbolic link"):
        private_socket_dir(root / "link")


def test_a_file_is_refused(root: Path) -> None:
    (root / "file").write_text("")
    with pytest.raises(PathError, match="file"):
        private_socket_dir(root / "file")


def test_a_missing_parent_is_named(root: Path) -> None:
    with pytest.raises(PathError, match=r"parent of the socket directory .*/missing/run does not exist"):
        private_socket_dir(root / "missing" / "run")


def test_a_path_too_long_for_a_socket_is_refused(root: Path) -> None:
    longest = 107 - len(str(root)) - len("//result.sock")
    private_socket_dir(root / ("d" * longest))
    with pytest.raises(PathError, match=r"has 108 bytes.*may have 107"):
        private_socket_dir(root / ("d" * (longest + 1)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_directory_of_another_user_is_refused(root: Path) -> None:
    (root / "theirs").mkdir(mode=0o700)
    os.chown(root / "theirs", 12345, -1)
    with pytest.raises(PathError, match="belongs to user 12345"):
        private_socket_dir(root / "theirs")


def test_sockets_of_a_dead_scheduler_are_cleared_away(root: Path) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(root / "plan.sock"))
    stale.close()  # the file stays, as after kill -9
    link = WorkerLink(root)
    assert {p.name for p in root.iterdir()} == {"plan.sock", "result.sock", "scheduler.lock"}
    link.close()
    assert {p.name for p in root.iterdir()} == {"scheduler.lock"}


def test_second_scheduler_in_a_directory_is_refused(root: Path) -> None:
    link = WorkerLink(root)
    before = (root / "plan.sock").stat().st_ino
    with pytest.raises(PathError, match="another scheduler uses"):
        WorkerLink(root)
    assert (root / "plan.sock").stat().st_ino == before
    link.close()
    WorkerLink(root).close()


@pytest.mark.parametrize("name", ["plan.sock", "result.sock"])
def test_a_file_in_the_place_of_a_socket_is_not_deleted(root: Path, name: str) -> None:
    (root / name).write_text("precious")
    with pytest.raises(PathError, match=f"{name} is not a socket"):
        WorkerLink(root)
    assert (root / name).read_text() == "precious"
    (root / name).unlink()
    WorkerLink(root).close()


def test_a_link_leaves_no_descriptor_behind(root: Path) -> None:
    WorkerLink(root).close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        link = WorkerLink(root)
        link.close()
        link.close()
        link.wake()
        (root / "result.sock").mkdir()
        with pytest.raises(PathError):
            WorkerLink(root)
        (root / "result.sock").rmdir()
    assert len(os.listdir("/proc/self/fd")) == before


def test_dropped_link_releases_its_sockets(root: Path) -> None:
    """In a child process, because a collection that waits for the link's sockets would block forever."""
    program = f"""
import gc, os, pathlib
from lineclear.scheduler.engine.worker_link import WorkerLink
root = pathlib.Path({str(root)!r})
WorkerLink(root).close()
before = len(os.listdir("/proc/self/fd"))
def forget():
    link = WorkerLink(root)
    link.itself = link  # only a collection finds it
forget()
gc.collect()
print(len(os.listdir("/proc/self/fd")) - before, sorted(os.listdir(root)))
WorkerLink(root).close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_SECONDS
    )
    assert (done.returncode, done.stdout) == (0, "0 ['scheduler.lock']\n")
