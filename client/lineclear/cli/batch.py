"""Prompts asked from the command line: one, shown as its answer comes, or many, written as results in order."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Any, TextIO, TypeVar

from lineclear.client import interrupts
from lineclear.client.stream import Stream
from lineclear.client.sync import Client
from lineclear.errors import LineclearError

from . import exits, screen
from .flags import Shown
from .prompts import Entry

T = TypeVar("T")


class Format(StrEnum):
    """Of a file of prompts. AUTO: by its name, else by its first line."""

    AUTO = "auto"
    TEXT = "text"
    JSONL = "jsonl"


def show(answer: Stream, shown: Shown) -> None:
    """Read an answer, showing it as it comes."""
    with interrupts.cancelling(answer.cancel), answer as stream:
        try:
            for delta in stream:
                if not shown.json_lines:
                    screen.show(delta.text)
                elif shown.deltas:
                    screen.show_json({"delta": screen.plain(delta)})
        finally:
            if not shown.json_lines and stream.text:
                screen.show("\n")
    if shown.json_lines:
        result = stream.result.to_dict()
        screen.show_json({"result": result} if shown.deltas else result)
    elif not shown.quiet and sys.stderr.isatty():
        screen.note(screen.summary(stream.result))


def several(
    client: Client, entries: Collection[Entry], out: Path | None, resume: bool, concurrency: int, progress: bool
) -> int:
    """Ask all, and write a JSON object for each in order. Returns how many failed.

    Raises the error of a server that is not there any more: what was written before can be resumed.
    """
    with _opened(out, resume) as (file, have):
        asked = itertools.islice(iter(entries), have, None)
        shown = itertools.islice(iter(entries), have, None)
        requests = _Counted((entry.request for entry in asked), max(len(entries) - have, 0))
        failed = 0
        outcomes = client.generate_each(requests, concurrency=concurrency, progress=progress)
        with interrupts.cancelling(outcomes.cancel), closing(outcomes):
            for index, (entry, outcome) in enumerate(zip(shown, outcomes, strict=False), have):
                if isinstance(outcome, LineclearError):
                    if outcome.code == "UNAVAILABLE":
                        raise outcome
                    failed += 1
                    answer = {"error": exits.as_dict(outcome)}
                else:
                    answer = outcome.to_dict()
                file.write(json.dumps({"index": index, **entry.shown, **answer}, ensure_ascii=False) + "\n")
                file.flush()
        return failed


def repeated(ask: Callable[[], T], interval_seconds: float, count: int | None) -> Iterator[T]:
    """What `ask` says, now and every so often, `count` times or for ever."""
    for number in itertools.count() if count is None else range(count):
        if number:
            time.sleep(interval_seconds)
        yield ask()


class _Counted:
    """An iterator that knows how many there are, for the progress bar."""

    def __init__(self, items: Iterator[Any], count: int) -> None:
        self._items = items
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return self._items


def _opened(out: Path | None, resume: bool) -> Any:
    """Where results go, and how many are there already."""
    return nullcontext((sys.stdout, 0)) if out is None else _Results(out, resume)


class _Results:
    """A file of results; when resumed, a last line that was not written to its end is dropped."""

    def __init__(self, path: Path, resume: bool) -> None:
        self._have = 0
        if resume and path.exists():
            with path.open("r+b") as file:
                end = 0
                for line in file:
                    if line.endswith(b"\n"):
                        self._have += 1
                        end += len(line)
                file.truncate(end)
        self._file: TextIO = path.open("a" if resume else "w", encoding="utf-8")

    def __enter__(self) -> tuple[TextIO, int]:
        return self._file, self._have

    def __exit__(self, *_: object) -> None:
        self._file.close()
