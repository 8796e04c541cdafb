"""Check that the private socket folder can be created in volumes of Kubernetes and Docker."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lineclear.process.private_dir import PathError, private_socket_dir


@pytest.mark.parametrize(
    "mode", [0o777, 0o2777, 0o1777, 0o700], ids=["emptyDir", "with fsGroup", "like /tmp", "compose"]
)
def test_private_directory_is_created_in_a_volume(tmp_path: Path, mode: int) -> None:
    volume = tmp_path / "v"
    volume.mkdir()
    volume.chmod(mode)
    made = private_socket_dir(volume / "sockets").directory
    assert made.stat().st_mode & 0o777 == 0o700
    # The second container uses the folder of the first one.
    assert private_socket_dir(volume / "sockets").directory == made


def test_volume_root_is_rejected(tmp_path: Path) -> None:
    """An emptyDir is writable for all users."""
    volume = tmp_path / "v"
    volume.mkdir()
    os.chmod(volume, 0o777)
    with pytest.raises(PathError, match="must be 0700"):
        private_socket_dir(volume)
