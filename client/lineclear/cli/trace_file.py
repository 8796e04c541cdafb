"""Record steps to a file: a Chrome trace, which is written while it grows, or an SVG timeline, which is drawn last."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

from lineclear.client import StepRecord, WatchedSteps
from lineclear.errors import LineclearError
from lineclear.render.chrome_trace import json_chunks
from lineclear.render.timeline import panels
from lineclear.render.timeline_svg import timeline_svg

from .step_feed import StepFeed

MAX_SVG_STEPS = 2000
"""Steps of an SVG timeline; of more, a step is narrower than half a pixel."""


class Recording:
    """The steps of a running server, until `seconds` have passed or `stop`. Iterate once."""

    def __init__(self, feed: StepFeed, seconds: float | None, most_steps: int | None) -> None:
        self.num_steps = self.num_skipped = 0
        self.workers: set[int] = set()
        self.ended_by = ""
        """Why the recording is shorter than asked; empty if it is not."""
        self._feed, self._most_steps = feed, most_steps
        self._until = None if seconds is None else time.monotonic() + seconds
        self._is_stopped = False

    def stop(self) -> None:
        """End the recording. May be called from a signal handler."""
        self._is_stopped = True
        self._feed.wake()

    def __iter__(self) -> Iterator[StepRecord]:
        """Yield each step. A server that stops after its first response ends the recording without an error."""
        has_answered = False
        try:
            while (item := self._next()) is not None:
                has_answered = True
                self.num_skipped += item.skipped
                for step in item.steps:
                    if self.num_steps == self._most_steps:
                        self.ended_by = f"{self._most_steps} steps are the most for an SVG; a .json file takes more"
                        return
                    self.num_steps += 1
                    self.workers.add(step.worker)
                    yield step
        except LineclearError as error:
            if not has_answered:
                raise
            self.ended_by = str(error)

    def _next(self) -> WatchedSteps | None:
        """Return the next response; None at the end."""
        while not self._is_stopped:
            left = None if self._until is None else self._until - time.monotonic()
            if left is not None and left <= 0:
                return None
            item = self._feed.get(left)
            if isinstance(item, WatchedSteps):
                return item
            if self._feed.is_at_end:
                self.ended_by = "the server has stopped"
                return None
        return None


def write(path: Path, recording: Recording) -> None:
    """Write the file by its suffix, .json or .svg. Without a step no file is written, and none is replaced."""
    if path.suffix == ".json":
        steps = iter(recording)
        if (first := next(steps, None)) is not None:
            with path.open("w", encoding="utf-8") as file:
                file.writelines(json_chunks(itertools.chain([first], steps)))
    elif drawn := list(recording):
        path.write_text(timeline_svg(panels(drawn)), encoding="utf-8")
