"""`make bench-gpu` without a GPU: failing parts, and what only a card takes with a stand-in."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.card import NAME, Profile, pretend
from support.launches import without_kernels

from bench import gpu, gpu_device, gpu_faults, gpu_report, gpu_steps, models
from bench.figures import Figure
from bench.gpu import PARTS, Context, Part, absent_packages, run_all
from bench.gpu_device import Device, idle_share
from bench.gpu_sizes import CARD, FAMILIES, REHEARSAL, sizes_of
from lineclear.worker.runner import model_runner


def part(name: str, *scripts: str, seconds: float = 10.0, least: float = 0.0, package: str = "") -> Part:
    def commands(context: Context) -> list[list[str]]:
        return [["-S", "-c", script, "OUT"] for script in scripts]

    return Part(name, seconds, least, commands, package)


FIGURE = '{"name": "a", "case": "b", "value": 1.0, "unit": "s", "goal": null, "more_is_better": false}'
WRITES = f"import sys; print({FIGURE!r}, file=open(sys.argv[1], 'w'))"


def test_failed_part_keeps_its_figures_and_the_rest_goes_on(tmp_path: Path) -> None:
    parts = [
        part("broken", WRITES, "raise SystemExit('a typo')"),
        part("hung", f"{WRITES}; sys.stdout.flush(); import time; time.sleep(60)", seconds=0.5),
        part("good", WRITES),
    ]
    broken, hung, good = run_all(parts, Context("cpu", tmp_path, REHEARSAL), {}, budget=60.0)
    assert (broken.state, hung.state, good.state) == ("failed", "failed", "done")
    assert "a typo" in broken.error
    assert "did not end" in hung.error
    assert hung.seconds < 30
    assert broken.figures == good.figures == [json.loads(FIGURE)]


def test_half_a_line_of_a_killed_part_is_left_out(tmp_path: Path) -> None:
    half = FIGURE.replace("1.0", '{"of": {}')
    writes = f"import sys; print({FIGURE!r}, {half[: half.index('}') + 1]!r}, sep=chr(10), file=open(sys.argv[1], 'w'))"
    (found,) = run_all([part("killed", writes)], Context("cpu", tmp_path, REHEARSAL), {}, budget=60.0)
    assert found.figures == [json.loads(FIGURE)]


def test_file_is_written_after_each_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever runs it may end it: what was measured before is kept."""

    def commands(context: Context) -> list[list[str]]:
        (path,) = tmp_path.glob("*.json")
        assert [x["name"] for x in json.loads(path.read_text())["parts"]] == ["first"]
        return []

    monkeypatch.setattr(gpu, "PARTS", (part("first", WRITES), Part("second", 10, 0, commands)))
    monkeypatch.setattr(gpu, "prepare", lambda folder: {})
    assert gpu.main(["--device", "cpu", "--results", str(tmp_path)]) == 0


def test_measurements_that_fail_do_not_end_the_others() -> None:
    def fails() -> Iterator[Figure]:
        yield Figure("a", "", 1.0, "s")
        raise KeyError("no such shape")

    found = gpu_device.each([fails(), iter([Figure("b", "", 2.0, "s")])])
    assert [next(found).name, next(found).name] == ["a", "b"]
    with pytest.raises(ExceptionGroup, match="not measured"):
        next(found)


def test_part_whose_command_cannot_be_made_fails_alone(tmp_path: Path) -> None:
    def commands(context: Context) -> list[list[str]]:
        raise KeyError("no such shape")

    found = run_all([Part("broken", 1, 0, commands)], Context("cpu", tmp_path, REHEARSAL), {}, budget=60.0)
    assert [(x.state, "no such shape" in x.error) for x in found] == [("failed", True)]


def test_parts_without_time_or_package_are_left_out(tmp_path: Path) -> None:
    parts = [part("late", WRITES, least=100.0), part("peer", WRITES, package="no_such_package")]
    late, peer = run_all(parts, Context("cpu", tmp_path, REHEARSAL), {}, budget=60.0)
    assert (late.state, peer.state) == ("left out", "left out")
    assert "needs 100 s" in late.error
    assert peer.error == "no_such_package is not installed"


def test_page_has_failed_and_left_out_parts(tmp_path: Path) -> None:
    parts = [
        {"name": "steps", "state": "failed", "seconds": 3.0, "error": "a typo", "figures": [], "runs": []},
        {"name": "vllm", "state": "left out", "seconds": 0.0, "error": "not installed", "figures": [], "runs": []},
    ]
    report = {"date": "2026-12-01T00:00:00", "commit": "c", "is_rehearsal": False, "device": {"name": "NVIDIA H200"}}
    report |= {"machine": {}, "versions": {}, "budget_seconds": 525.0, "seconds": 3.0, "parts": parts}
    path = gpu_report.write(report, tmp_path)
    assert path.name == "2026-12-01-gpu-nvidia-h200.json"
    page = path.with_suffix(".md").read_text()
    assert "| steps | **failed** | 3 |" in page
    assert "a typo" in page


def test_budget_ends_before_nine_minutes() -> None:
    """Whatever hangs: a part ends with the time that is left, and a second more is lost for each."""
    assert PARTS[0].name == "device", "the others need to know the device"
    assert all(part.least <= part.seconds for part in PARTS)
    assert absent_packages() == []


def test_families_have_models() -> None:
    assert set(FAMILIES) == set(models.FAMILIES)
    assert {CARD.step_shape, CARD.served_shape, REHEARSAL.step_shape} <= set(models.SHAPES)
    config = models.SHAPES[CARD.step_shape].config()
    model = models.random_model(models.SHAPES[CARD.step_shape], "meta")
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248, "that of Llama 3 8B"
    assert config.num_hidden_layers == 32


@pytest.fixture(name="card")
def make_card(monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[Device, list[str]]]:
    def make() -> tuple[Device, list[str]]:
        called = pretend(monkeypatch)
        monkeypatch.setattr(gpu_device, "profile", Profile)
        return Device("cuda", torch.device("cpu"), REHEARSAL), called

    return make


def test_named_card_is_made_current(monkeypatch: pytest.MonkeyPatch) -> None:
    called = pretend(monkeypatch)
    assert Device.named("cuda:1") == Device("cuda", torch.device("cuda:1"), CARD)
    assert called == ["set_device"]
    assert sizes_of("cuda:0") is CARD


def test_facts_and_rates_of_a_card(card: Callable[[], tuple[Device, list[str]]], tmp_path: Path) -> None:
    device, called = card()
    options = argparse.Namespace(facts=tmp_path / "facts")
    found = list(gpu_device._with_facts(device, options))
    facts = json.loads((tmp_path / "facts").read_text())
    assert (facts["name"], facts["memory_gib"], facts["compute_capability"]) == (NAME, 80.0, "9.0")
    assert [figure.unit for figure in found] == ["TB/s", "TFLOP/s"]
    assert all(figure.value is not None and figure.value > 0 for figure in found)
    assert device.idle_share(lambda: None) == pytest.approx(0.5)
    assert {"get_device_properties", "mem_get_info", "synchronize"} <= set(called)


def test_steps_on_a_card_are_replays(
    card: Callable[[], tuple[Device, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, called = card()
    without_kernels(monkeypatch)
    monkeypatch.setattr(gpu_steps, "configure", lambda *_: None)  # the log of this process
    monkeypatch.setattr(model_runner, "choose", lambda *_: "triton_paged")
    found = {f"{figure.name}, {figure.case}": figure for figure in gpu_steps.figures(device, argparse.Namespace())}
    num_steps = gpu_steps.WARM_UP_STEPS + REHEARSAL.steps + gpu_steps.PROFILED_STEPS
    # Neither the warm-up of a graph nor its capture is a replay, and prompts and eager steps have none.
    assert called.count("replay") == num_steps * len(REHEARSAL.batches)
    step = found["decode: step over its floor, 1 decodes at 30, graphs"]
    assert step.goal == gpu_steps.GOAL_OVER_FLOOR
    assert found["memory: most held for tensors, eager"].value == 3.0


def test_memory_of_a_card_is_taken_and_given_back(
    card: Callable[[], tuple[Device, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch asks the driver for 20 MiB where a tensor has up to 10 MiB, and for multiples of 2 MiB otherwise."""
    device, called = card()
    free = [(3 << 30) + (13 << 20)]

    def empty(size: int, **_: object) -> object:
        segment = 20 << 20 if size <= 10 << 20 else -(-size >> 21) << 21
        if segment > free[0]:
            raise torch.OutOfMemoryError
        free[0] -= segment
        return object()

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 80 << 30))
    monkeypatch.setattr(torch, "empty", empty)
    with gpu_faults.memory_taken(device, pid=0):
        assert free[0] <= 4 << 20
        assert "empty_cache" not in called
    assert called[-1] == "empty_cache"


@pytest.mark.parametrize(
    ("spans", "share"),
    [([(0, 10)], 0.0), ([(0, 4), (6, 10)], 0.2), ([(0, 10), (2, 3)], 0.0), ([(0, 5), (4, 8), (9, 10)], 0.1)],
)
def test_idle_share(spans: list[tuple[float, float]], share: float) -> None:
    assert idle_share(spans) == pytest.approx(share)


def test_empty_profile_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="saw nothing"):
        idle_share([])
