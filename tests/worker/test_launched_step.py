"""The duration of a step, by the host's clock and by CUDA events."""

from __future__ import annotations

import pytest
import torch

from lineclear.worker.runner.launched_step import StepTimer


class Event:
    """A CUDA event. The n-th one is recorded n * 250 ms after the first."""

    count = 0
    synchronized: list[int]

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.number, Event.count = Event.count, Event.count + 1

    def record(self, stream: object) -> None:
        assert stream == "the stream"

    def synchronize(self) -> None:
        Event.synchronized.append(self.number)

    def elapsed_time(self, end: Event) -> float:
        return 250.0 * (end.number - self.number)


def test_a_step_on_cuda_takes_the_time_between_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "count", 0)
    monkeypatch.setattr(Event, "synchronized", [], raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream")
    timer = StepTimer(torch.device("cuda"), "cuda")
    assert not timer.stop(), "the device may still compute"
    assert timer.wait() == 0.25
    assert Event.synchronized == [1]


def test_a_step_on_a_cpu_takes_the_time_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([3.0, 5.5])
    monkeypatch.setattr("lineclear.worker.runner.launched_step.time.perf_counter", lambda: next(times))
    timer = StepTimer(torch.device("cpu"), "cpu")
    assert timer.stop()
    assert timer.wait() == 2.5
