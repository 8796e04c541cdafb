"""Pauses between large requests: as long as the last one took, and every request counts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.serving import serving

from lineclear.scheduler.requests.loop_pacer import LoopPacer
from lineclear.v1 import inference_pb2 as pb


class Clock:
    """Time that passes only by work and sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        monkeypatch.setattr("lineclear.scheduler.requests.loop_pacer.asyncio.sleep", self.sleep)

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 6))
        self.now += seconds


async def test_pause_equals_the_time_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pace = LoopPacer(clock)

    async def large(seconds: float) -> None:
        await pace.wait()
        with pace.measured():
            clock.now += seconds

    await asyncio.gather(large(0.004), large(0.001), large(0.002))
    assert clock.slept == [0.0, 0.004, 0.001]


def test_short_work_does_not_shorten_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pace = LoopPacer(clock)
    with pace.measured():
        clock.now += 0.5
    with pace.measured():
        clock.now += 0.01
    asyncio.run(pace.wait())
    assert clock.slept == [0.49]


def test_failed_work_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pace = LoopPacer(clock)

    def fail() -> None:
        with pace.measured():
            clock.now += 0.25
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        fail()
    asyncio.run(pace.wait())
    assert clock.slept == [0.25]


async def test_large_tokenize_inputs_are_paced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[None] = []

    async with serving(tmp_path) as s:
        original = s.service.pacer.wait

        async def wait() -> None:
            waits.append(None)
            await original()

        monkeypatch.setattr(s.service.pacer, "wait", wait)
        await s.stub.Tokenize(pb.TokenizeRequest(text="a"))
        assert not waits
        await s.stub.Tokenize(pb.TokenizeRequest(text="a" * 5000))
        assert len(waits) == 1
