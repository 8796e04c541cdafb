"""Measures how long a step takes on its device."""

from __future__ import annotations

import time

import torch


class StepTimer:
    """Measures the duration of a step: with CUDA events on CUDA, with the host's clock elsewhere."""

    def __init__(self, device: torch.device, device_type: str) -> None:
        self._device, self._device_type = device, device_type
        self._start_event = self._event()
        self._end_event: torch.cuda.Event | None = None
        self._started_at = time.perf_counter()
        self._stopped_at = self._started_at

    def stop(self) -> bool:
        """Record that all work of the step is queued. Returns whether it is also complete."""
        self._end_event = self._event()
        self._stopped_at = time.perf_counter()
        return self._device_type == "cpu"

    def wait(self) -> float:
        """Wait until the step is complete and return its seconds."""
        if self._start_event is None or self._end_event is None:
            return self._stopped_at - self._started_at
        self._end_event.synchronize()
        return float(self._start_event.elapsed_time(self._end_event)) / 1000

    def _event(self) -> torch.cuda.Event | None:
        if self._device_type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
