"""Settings of the worker, and the memory budget for num_blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lineclear.process.settings_base import ConfigurationError
from lineclear.worker.attention.registry import BACKENDS
from lineclear.worker.device.machine_share import MachineShare
from lineclear.worker.device.memory_budget import _cgroup_bytes, blocks_that_fit
from lineclear.worker.runner.runner_factory import choose_device, graph_batch_sizes
from lineclear.worker.settings import WorkerSettings, load

REQUIRED = ["--model", "a-model", "--socket-directory", "/run/sockets"]


def test_environment_sets_required_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINECLEAR_WORKER_MODEL", "m")
    monkeypatch.setenv("LINECLEAR_WORKER_SOCKET_DIRECTORY", "/d")
    monkeypatch.setenv("LINECLEAR_WORKER_NOBODY_KNOWS", "this")
    assert load([]).model == "m"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ([*REQUIRED, "--cuda-graph-batch-sizes", "1,two"], "'1,two' is neither auto, none nor numbers of requests"),
        ([], "--model is missing.*LINECLEAR_WORKER_MODEL.*\n--socket-directory is missing"),
        ([*REQUIRED, "--device", "tpu"], "^--device tpu: 'tpu' is no device; give auto, cpu, cuda, mps"),
        ([*REQUIRED, "--kv-cache-memory-fraction", "1"], "^--kv-cache-memory-fraction 1 is not a number from 0 to bel"),
        ([*REQUIRED, "--no-such-flag", "1"], "there is no flag --no-such-flag; --help lists them, and those of the"),
    ],
)
def test_wrong_worker_setting_is_named(flags: list[str], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        load(flags)


def test_ngrams_of_one_size_are_allowed() -> None:
    sizes = ["--prompt-lookup-min", "3", "--prompt-lookup-max"]
    assert load([*REQUIRED, *sizes, "3"]).prompt_lookup_max == 3
    with pytest.raises(ConfigurationError, match=r"--prompt-lookup-min \(3\) is larger than --prompt-lookup-max \(2\)"):
        load([*REQUIRED, *sizes, "2"])


@pytest.mark.parametrize(
    ("flag", "max_batch_size", "sizes"),
    [
        ("auto", 20, [1, 2, 4, 8, 16, 24]),
        ("auto", 4096, [1, 2, 4, *range(8, 257, 8)]),
        ("none", 20, []),
        ("3, 7", 20, [3, 7]),
    ],
)
def test_batch_sizes_of_cuda_graphs(flag: str, max_batch_size: int, sizes: list[int]) -> None:
    flags = ["--cuda-graph-batch-sizes", flag, "--max-batch-size", str(max_batch_size)]
    assert graph_batch_sizes(load([*REQUIRED, *flags])) == sizes


def test_attention_backends_match_the_registry() -> None:
    choices = WorkerSettings.model_fields["attention_backend"].annotation
    assert set(getattr(choices, "__args__")) == {"auto", *BACKENDS}  # noqa: B009  # a Literal's, unknown to mypy


def test_missing_device_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert choose_device("auto")[0].type == "cpu"
    with pytest.raises(ConfigurationError, match="no cuda device"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto")[0].type == "cuda"


@pytest.mark.parametrize(("num_devices", "most"), [(1, 4), (2, 2), (3, 2), (4, 1), (8, 1)])
def test_workers_of_a_gpu_divide_its_memory(num_devices: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    share = MachineShare.parse("0/4")
    assert choose_device("cuda", share)[1].count == most
    assert choose_device("cpu", share)[1].count == 4


def test_num_blocks_from_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr("lineclear.worker.device.memory_budget._available_bytes", lambda: 1_000_000)
    monkeypatch.setattr("lineclear.worker.device.memory_budget._cgroup_bytes", lambda: 400_000)
    assert blocks_that_fit(1000, max_blocks=10_000, fraction=0.0, device=cpu) == 200
    assert blocks_that_fit(1000, max_blocks=10_000, fraction=0.9, device=cpu) == 360
    assert blocks_that_fit(1000, max_blocks=30, fraction=0.9, device=cpu) == 30
    assert blocks_that_fit(10**9, max_blocks=30, fraction=0.9, device=cpu) == 0


NO_LIMIT = 2**60
NO_LIMIT_V1 = {"limit_in_bytes": str(2**63 - 4096), "usage_in_bytes": "5000", "stat": "total_inactive_file 10"}
LIMIT_V1 = {"limit_in_bytes": "1000", "usage_in_bytes": "700", "stat": "inactive_file 1\ntotal_inactive_file 250"}
SLICE, BOTH = "system.slice/lineclear.service", "4:memory:/a\n0::/b\n"
SERVICE = f"4:memory:/elsewhere\n0::/{SLICE}\n"
CONTAINER = "9:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n"
CGROUPS: dict[str, list[tuple[str, str, dict[str, str], int]]] = {
    "the file cache is left out": [
        ("", "", {}, NO_LIMIT),
        ("", "", {"max": "1000", "current": "700", "stat": "anon 400\ninactive_file 250\nactive_file 1"}, 550),
        ("", "", {"max": "max"}, NO_LIMIT),
    ],
    "limits of parents count": [
        (SERVICE, "system.slice", {"max": "900", "current": "400", "stat": "inactive_file 0"}, 500),
        (SERVICE, SLICE, {"max": "800", "current": "200", "stat": "inactive_file 0"}, 500),
        (SERVICE, SLICE, {"current": "700"}, 100),
        ("0::/\n", SLICE, {}, NO_LIMIT),
    ],
    "version 1 on the host": [
        (CONTAINER, "memory", NO_LIMIT_V1, NO_LIMIT),
        (CONTAINER, "memory/docker/abc", LIMIT_V1, 550),
    ],
    "version 1 in a container": [
        (CONTAINER, "memory", NO_LIMIT_V1, NO_LIMIT),
        (CONTAINER, "memory", LIMIT_V1, 550),
    ],
    "parents of version 1": [
        ("4:memory:/pods/pod/us\n", "memory/pods/pod/us", NO_LIMIT_V1, NO_LIMIT),
        ("4:memory:/pods/pod/us\n", "memory/pods/pod", {**LIMIT_V1, "stat": ""}, 300),
    ],
    "both versions": [
        (BOTH, "memory/a", {"limit_in_bytes": "800", "usage_in_bytes": "300", "stat": ""}, 500),
        (BOTH, "unified/b", {"max": "400", "current": "100", "stat": ""}, 300),
    ],
    "above memory.high a process is not killed, and stands still": [
        ("0::/a/b\n", "a", {"max": "900", "high": "600", "current": "200", "stat": ""}, 400),
        ("0::/a/b\n", "a/b", {"max": "max", "high": "max", "current": "100", "stat": ""}, 400),
        ("0::/a/b\n", "a/b", {"high": "350"}, 250),
    ],
}


@pytest.mark.parametrize("name", CGROUPS)
def test_cgroup_limits_count(tmp_path: Path, name: str) -> None:
    for own, folder, files, expected in CGROUPS[name]:
        (tmp_path / "own").write_text(own)
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (tmp_path / folder / f"memory.{file}").write_text(f"{text}\n")
        assert min(_cgroup_bytes(tmp_path, tmp_path / "own"), NO_LIMIT) == expected
