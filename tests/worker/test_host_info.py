"""Cores, allocator and huge pages, read from a copy of the kernel's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lineclear.worker.device.host_info import allocator, huge_pages, usable_cores


def put(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def bound_to_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


V2, V1 = "cpu.max", "cpu/cpu.cfs_quota_us"
LINECLEAR, POD = "0::/system.slice/lineclear.service\n", "5:memory:/m\n4:cpu,cpuacct:/pod/one\n0::/\n"


@pytest.mark.usefixtures("bound_to_eight")
@pytest.mark.parametrize(
    ("groups", "name", "quota", "cores"),
    [
        ("", "none", "", 8),
        ("", V2, "max 100000\n", 8),
        ("", V2, "200000 100000\n", 2),
        ("", V2, "250000 100000\n", 3),
        ("", V2, "5000 100000\n", 1),
        ("", V2, "9900000 100000", 8),
        ("", V1, "-1\n", 8),
        ("", V1, "150000\n", 2),
        (LINECLEAR, "system.slice/lineclear.service/cpu.max", "300000 100000\n", 3),
        (LINECLEAR, "system.slice/cpu.max", "300000 100000\n", 3),
        (POD, "cpu/pod/one/cpu.cfs_quota_us", "300000\n", 3),
        (POD, "cpu/pod/cpu.cfs_quota_us", "300000\n", 3),
    ],
)
def test_quota_limits_cores(tmp_path: Path, groups: str, name: str, quota: str, cores: int) -> None:
    """Of the control groups of both versions, also where only a group below the mount has one."""
    if groups:
        put(tmp_path, "proc/self/cgroup", groups)
        put(tmp_path, "sys/fs/cgroup/cpu.max", "max 100000\n")
    put(tmp_path, f"sys/fs/cgroup/{name}", quota)
    put(tmp_path, f"sys/fs/cgroup/{Path(name).parent}/cpu.cfs_period_us", "100000\n")
    assert usable_cores(tmp_path) == cores


@pytest.mark.usefixtures("bound_to_eight")
def test_smallest_quota_counts(tmp_path: Path) -> None:
    put(tmp_path, "proc/self/cgroup", "0::/outer/inner\n")
    for name, quota in (("", 600_000), ("outer/", 200_000), ("outer/inner/", 400_000)):
        put(tmp_path, f"sys/fs/cgroup/{name}cpu.max", f"{quota} 100000\n")
    assert usable_cores(tmp_path) == 2


def test_allocator_is_the_loaded_one(tmp_path: Path) -> None:
    assert allocator(tmp_path) == "libc"
    put(tmp_path, "proc/self/maps", "7f00-7f01 r-xp 0 08:01 5 /usr/lib/libtcmalloc_minimal.so.4.5.16\n")
    assert allocator(tmp_path) == "tcmalloc"


def test_huge_pages_mode_is_read(tmp_path: Path) -> None:
    assert huge_pages(tmp_path) == "unknown"
    put(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    assert huge_pages(tmp_path) == "madvise"
