"""Device and cores of a worker, on copies of the kernel's files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.engine_harness import ENVIRONMENT
from worker.test_host_info import put

from lineclear.process.device_names import split_devices
from lineclear.process.settings_base import ConfigurationError
from lineclear.worker.device.host_info import divide_quota, usable_cores
from lineclear.worker.device.machine_share import MachineShare, bind, claim, cores_of, named_cores
from lineclear.worker.runner.runner_factory import choose_device


def nodes(root: Path, *cpu_lists: str) -> None:
    for number, cores in enumerate(cpu_lists):
        put(root, f"sys/devices/system/node/node{number}/cpulist", f"{cores}\n")


def shares(root: Path, count: int, usable: int) -> list[list[int]]:
    return [sorted(cores_of(MachineShare(index, count), range(usable), root)) for index in range(count)]


@pytest.mark.parametrize(
    ("cpu_lists", "usable", "wanted"),
    [
        (["0-7"], 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (["0-7"], 8, [[0, 1], [2, 3, 4], [5, 6, 7]]),
        (["0-7"], 2, [[0], [1], [0]]),  # more workers than cores
        ([], 4, [[0, 1], [2, 3]]),  # without the kernel's files
        (["0-3", "4-7", ""], 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),  # a node each
        (["0-1", "2-3", "4-5", "6-7"], 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),  # whole nodes
        (["0-3", "4-7"], 8, [[0, 1], [2, 3], [4, 5], [6, 7]]),  # within a node
        (["0-3", "4-7"], 8, [[0, 1], [2, 3], [4, 5, 6, 7]]),
        (["0-3", "4-7"], 4, [[0, 1], [2, 3]]),  # the affinity leaves out the other node
    ],
)
def test_usable_cores_are_divided(tmp_path: Path, cpu_lists: list[str], usable: int, wanted: list[list[int]]) -> None:
    nodes(tmp_path, *cpu_lists)
    assert shares(tmp_path, len(wanted), usable) == wanted


def test_hardware_threads_of_a_core_stay_together(tmp_path: Path) -> None:
    nodes(tmp_path, "0-7")
    for core in range(8):
        put(tmp_path, f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list", f"{core % 4},{core % 4 + 4}\n")
    assert shares(tmp_path, 2, 8) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_quota_is_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    put(tmp_path, "sys/fs/cgroup/cpu.max", "400000 100000\n")
    assert usable_cores(tmp_path) == 4
    divide_quota(2)
    try:
        assert usable_cores(tmp_path) == 2
    finally:
        divide_quota(1)


@pytest.mark.parametrize("text", ["", "1", "2/2", "0/0", "-1/2", "0/2/3", "a/b"])
def test_a_share_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="INDEX/COUNT"):
        MachineShare.parse(text)


def test_names_of_devices() -> None:
    assert split_devices("cuda:0,cuda:1") == ["cuda:0", "cuda:1"]
    assert split_devices("cpu:0-3,8,cpu:4-7") == ["cpu:0-3,8", "cpu:4-7"]
    uuids = ["cuda:GPU-89999999-1111-4106-c12f-20bd9faed9f6", "cuda:MIG-GPU-8932f937-d72c/1/2"]
    assert split_devices(",".join(uuids)) == uuids
    assert named_cores("cpu:0-3,8") == {0, 1, 2, 3, 8}
    assert named_cores("cpu") == named_cores("cuda:1") == frozenset()
    for bad in ("gpu", "cuda:", "cuda:GPU-", "GPU-89999999", "cpu:a", "cuda:0;cuda:1", "3,cpu"):
        with pytest.raises(ValueError, match="no device"):
            split_devices(bad)


def test_each_share_takes_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = [choose_device("auto", MachineShare(index, 3)) for index in range(3)]
    assert [device for device, _ in found] == [torch.device("cuda", index) for index in (0, 1, 0)]
    assert [share for _, share in found] == [MachineShare(0, 2), MachineShare(0, 1), MachineShare(1, 2)]
    assert choose_device("cuda:1", MachineShare(0, 2)) == (torch.device("cuda", 1), MachineShare(0, 2))
    assert choose_device("auto") == (torch.device("cuda"), MachineShare())
    with pytest.raises(ConfigurationError, match="2 GPUs"):
        choose_device("cuda:2")


def test_a_core_that_is_not_usable_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="names core 4095"):
        bind(frozenset({*os.sched_getaffinity(0), 4095}))


BOUND = """
import os, threading
from lineclear.worker.device.machine_share import bind
started, done = threading.Event(), threading.Event()
found = []
def run():
    started.set()
    done.wait()
    found.append(os.sched_getaffinity(threading.get_native_id()))
thread = threading.Thread(target=run)
thread.start()
started.wait()
core = min(os.sched_getaffinity(0))
bind(frozenset({core}))
done.set()
thread.join()
assert found == [{core}] and os.sched_getaffinity(0) == {core}, found
"""


WHOLE, HALF = MachineShare(), MachineShare(0, 2)


def claimed(directory: Path, cores: list[int], gpu: str = "", share: MachineShare = WHOLE) -> subprocess.Popen[str]:
    """Start a process that claims the places and then waits for its end."""
    code = (
        "import sys; from pathlib import Path; from lineclear.worker.device.machine_share import MachineShare, claim\n"
        f"print(claim(Path({str(directory)!r}), {cores}, {gpu!r}, {share}), flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "[]\n"
    return process


def test_workers_on_the_same_cores_or_gpu_are_noticed(tmp_path: Path) -> None:
    others = [claimed(tmp_path, [0, 1, 2]), claimed(tmp_path, [], "GPU-b"), claimed(tmp_path, [], "GPU-c", HALF)]
    try:
        assert claim(tmp_path, [3, 4]) == []
        assert claim(tmp_path, [1, 2, 5]) == ["core 1", "core 2"]
        assert claim(tmp_path, gpu="GPU-a") == []
        assert claim(tmp_path, gpu="GPU-b") == ["GPU-b"]
        assert claim(tmp_path, gpu="GPU-c", share=MachineShare(1, 2)) == []
        for overlapping in (HALF, MachineShare(), MachineShare(1, 3)):
            assert claim(tmp_path, gpu="GPU-c", share=overlapping) == ["GPU-c"]
        assert claim(tmp_path / "none", [0]) == []
    finally:
        for other in others:
            other.communicate()
    assert claim(tmp_path, [0, 1, 2]) == [], "a worker that has ended uses nothing"


def test_all_threads_of_the_process_are_bound() -> None:
    subprocess.run([sys.executable, "-c", BOUND], check=True, timeout=60)
