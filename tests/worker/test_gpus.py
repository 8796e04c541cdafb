"""GPUs of a worker, their names and their memory, on stubs of torch: nothing here has run on a device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from structlog.testing import capture_logs
from worker.test_machine_share import HALF, claimed

from lineclear.process.device_names import split_devices
from lineclear.process.settings_base import ConfigurationError
from lineclear.scheduler.main import _placements
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.worker.device import gpus, memory_budget
from lineclear.worker.device.gpus import claim_gpu, device_name, keep_instance, visible_instances
from lineclear.worker.device.machine_share import MachineShare, claim
from lineclear.worker.device.memory_budget import blocks_that_fit
from lineclear.worker.runner import runner_factory
from lineclear.worker.runner.runner_factory import choose_device, make_runner
from lineclear.worker.settings import WorkerSettings
from lineclear.worker.tensor_parallel.ranks import Ranks

GIB = 1 << 30
WHOLE, SECOND = MachineShare(), MachineShare(1, 2)
UUIDS = "8932f937-d72c-4106-c12f-20bd9faed9f6", "89ff0000-1111-2222-3333-444455556666"
FIRST_GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the GPUs of the process, which a test may change."""
    names = ["NVIDIA A100", "NVIDIA A100"]
    for name in gpus._LISTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(names))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index or 0])

    def properties(device: torch.device | int) -> Any:
        index = device if isinstance(device, int) else device.index or 0
        return SimpleNamespace(name=names[index], uuid=UUIDS[index])

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    return names


def test_gpu_is_found_by_its_uuid() -> None:
    for index, uuid in enumerate(UUIDS):
        assert choose_device(f"cuda:GPU-{uuid}", SECOND) == (torch.device("cuda", index), SECOND)
    assert choose_device("cuda:GPU-8932")[0].index == 0, "as CUDA, which takes a unique beginning"
    for name, count in (("GPU-89", 2), ("GPU-7777", 0)):
        with pytest.raises(ConfigurationError, match=f"cuda:{name}: that is {count} of the GPUs .*GPU-{UUIDS[1]}"):
            choose_device(f"cuda:{name}")


def test_device_is_named_as_nvidia_smi_names_it(seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_name(torch.device("cuda", 1)) == f"NVIDIA A100 (GPU-{UUIDS[1]})"
    assert device_name(torch.device("cpu")) == "cpu"
    seen[0] = "NVIDIA A100 MIG 1g.10gb"
    assert device_name(FIRST_GPU) == seen[0], "its UUID may be that of the whole GPU"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a")
    assert device_name(FIRST_GPU) == f"{seen[0]} (MIG-a)"


@pytest.mark.parametrize("variable", gpus._LISTS)
def test_workers_divide_the_instances(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for index in range(3):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "MIG-a, MIG-b")
            patch.setattr(torch.cuda, "device_count", lambda: len(visible_instances()) and 1)
            device, share = choose_device("auto", MachineShare(index, 3))
            found.append((os.environ["CUDA_VISIBLE_DEVICES"], share.index, share.count))
            assert device.type == "cuda"
            assert not device.index
            os.environ.pop("CUDA_VISIBLE_DEVICES")
    assert found == [("MIG-a", 0, 2), ("MIG-b", 0, 1), ("MIG-a", 1, 2)]


@pytest.mark.parametrize(
    ("given", "place", "kept"),
    [
        ("MIG-a,MIG-b", "1", "MIG-b"),
        ("MIG-a,MIG-b", "MIG-b", "MIG-b"),
        (None, "MIG-c", "MIG-c"),
        ("MIG-a,MIG-b", "2", ""),
        ("MIG-a,MIG-b", "MIG-c", ""),
        ("0,1", "MIG-c", ""),
        ("", "MIG-c", ""),
    ],
)
def test_named_instance_is_kept_or_refused(
    given: str | None, place: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    if not kept:
        with pytest.raises(ConfigurationError, match=f"--device cuda:{place}: this process may use .* only"):
            keep_instance(place, WHOLE)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == given
        return
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given or "")  # so that it is removed after the test
    if given is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
    assert keep_instance(place, SECOND) == (kept, SECOND)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == kept


def test_without_instances_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ("0,1", f"GPU-{UUIDS[0]}"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "MIG-a")
        assert keep_instance("", SECOND) == ("", SECOND)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == given


def settings_of(folder: Path, **more: Any) -> WorkerSettings:
    fixed = {"model": str(folder), "socket_directory": str(folder / "sockets"), "threads": 1}
    return WorkerSettings(**fixed | more)


def one_of_two() -> Ranks:
    return cast("Ranks", SimpleNamespace(rank=0, count=2, end_if_lost=lambda: None))


def test_model_is_not_divided_over_instances(tmp_path: Path, seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    seen.pop()
    with pytest.raises(ConfigurationError, match="size 2 needs whole GPUs; this machine has MIG instances"):
        make_runner(settings_of(tmp_path, tensor_parallel_size=2), one_of_two())


def test_ranks_are_refused_with_deterministic(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, tensor_parallel_size=2, device="cpu", deterministic=True)
    with pytest.raises(ConfigurationError, match="--deterministic: sums over several ranks have another order"):
        make_runner(settings, one_of_two())


@pytest.mark.parametrize(
    ("devices", "flags"),
    [
        ("cuda:0,cuda:1", ["", ""]),
        ("cuda:GPU-89ff,cuda:0,cuda:GPU-89ff", ["0/2", "", "1/2"]),
        ("cpu:0-3,cpu:4-7", ["0/2", "1/2"]),
        ("", ["0/2", "1/2"]),
    ],
)
def test_workers_of_one_named_gpu_divide_it(devices: str, flags: list[str]) -> None:
    given: dict[str, Any] = {"worker_devices": devices} if devices else {"num_workers": 2}
    settings = SchedulerSettings(model="m", spawn_worker=True, **given)
    named = [[f"--device={device}"] for device in split_devices(devices)] or [[], []]
    wanted = [[*([f"--machine-share={flag}"] if flag else []), *name] for flag, name in zip(flags, named, strict=True)]
    assert _placements(settings) == wanted


# --- the memory of a worker that has been killed ----------------------------------------------------------------------


def test_worker_waits_until_its_part_of_the_gpu_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = claimed(tmp_path, [], f"GPU-{UUIDS[0]}", HALF)
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            other.communicate()

    monkeypatch.setattr(gpus.time, "sleep", sleep)
    with capture_logs() as logs:
        claim_gpu(tmp_path, FIRST_GPU, SECOND)
        assert (pauses, logs) == ([], []), "by intent, two workers have a half each"
        claim_gpu(tmp_path, FIRST_GPU, HALF)
    assert len(pauses) == 3
    assert [(line["event"], line["device"]) for line in logs] == [("waiting_for_device", f"GPU-{UUIDS[0]}")]


def test_worker_of_a_gpu_that_another_one_keeps_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_CLAIM_SECONDS", 0.1)
    other = claimed(tmp_path, [], f"GPU-{UUIDS[0]}")
    try:
        with pytest.raises(ConfigurationError, match=f"has held GPU-{UUIDS[0]} for 0.1 s; give each its own"):
            claim_gpu(tmp_path, FIRST_GPU, HALF)
    finally:
        other.communicate()


@pytest.fixture(name="free_bytes")
def make_free_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yield the answers of the driver to be given, the last one for ever; 80 GiB are the whole, 10 are this process's.

    Time passes in sleeps only.
    """
    answers, now = list[int](), [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    stub = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(memory_budget, "time", stub)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 * GIB)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda device: (answers.pop(0) if len(answers) > 1 else answers[0], 80 * GIB)
    )
    yield answers
    assert now[0] < 31


def blocks() -> int:
    return blocks_that_fit(GIB, 1000, 0.5, FIRST_GPU)


def test_blocks_are_counted_once_the_memory_is_returned(free_bytes: list[int]) -> None:
    free_bytes[:] = [4 * GIB, 4 * GIB + 1 * GIB, 40 * GIB, 68 * GIB, 68 * GIB + 1024]
    with capture_logs() as logs:
        assert blocks() == 34
    (line,) = logs
    assert (line["event"], line["freed_bytes"], line["is_rising"]) == ("device_memory_awaited", 64 * GIB + 1024, False)


def test_memory_that_others_keep_is_waited_for_once(free_bytes: list[int]) -> None:
    free_bytes[:] = [30 * GIB, 20 * GIB, 60 * GIB]
    with capture_logs() as logs:
        assert (blocks(), free_bytes, logs) == (10, [60 * GIB], [])


def test_alone_on_a_gpu_nothing_is_waited_for(free_bytes: list[int]) -> None:
    free_bytes[:] = [80 * GIB - 10 * GIB - GIB // 2, 0]
    assert (blocks(), free_bytes) == (34, [0])


def test_memory_that_rises_for_ever_is_waited_for_within_a_bound(
    free_bytes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes[:] = [index * GIB // 2 for index in range(1, 100)]
    with capture_logs() as logs:
        assert blocks() == 15
    assert logs[0]["is_rising"]


def test_gpu_is_claimed_before_anything_is_put_on_it(
    tmp_path: Path, free_bytes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before its context is made; and before the scheduler has made the directory of the sockets."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(f"set_device {device.index}"))
    monkeypatch.setattr(runner_factory, "free_bytes", lambda device: calls.append("free_bytes"))
    monkeypatch.setattr(gpus, "claim", lambda *_, **more: calls.append(f"claim {more['gpu'][:8]}"))
    free_bytes.append(0)
    runner_factory._claim_device(settings_of(tmp_path), *choose_device("cuda:1"))
    assert calls == ["claim GPU-89ff", "set_device 1", "free_bytes"]
    assert (tmp_path / "sockets").is_dir()
    assert claim(tmp_path / "sockets", gpu="GPU-x") == []
