"""Run one prompt and stream its answer, or many prompts and write their results in order."""

from __future__ import annotations

import functools
import itertools
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, TextIO, TypeVar

import typer

from lineclear.client import Client, Delta, Stream, sigint
from lineclear.client.requests import Request
from lineclear.errors import DataLoss, LineclearError

from . import exit_status, output
from .options import Shown, option
from .prompt_file import Entry, FileFormat, PromptFile

T = TypeVar("T")


def show(answer: Stream, shown: Shown) -> None:
    """Read an answer and write it while it streams."""
    output.read_answer(answer, is_shown=not shown.json_lines, on_delta=_show_delta if shown.deltas else None)
    if shown.json_lines:
        result = answer.result.to_dict()
        output.show_json({"result": result} if shown.deltas else result)
    elif not shown.quiet and sys.stderr.isatty():
        output.print_stderr(output.summary(answer.result))


def _show_delta(delta: Delta) -> None:
    values = output.to_json(delta)
    if not delta.restarted:
        del values["restarted"]
    output.show_json({"delta": values})


class Entries(Protocol):
    """Prompts whose number is known before they are read."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Entry]: ...


_several = functools.partial(option, panel="Many prompts")


@dataclass(frozen=True)
class ManyPrompts:
    """The prompts of a file, and where and how their results are made."""

    file: Annotated[
        Path | None,
        _several(
            'Prompts, one per line, or JSON objects: {"prompt": ..., "max_tokens": ...}. -: standard input.',
            dir_okay=False,
        ),
    ] = None
    file_format: Annotated[
        FileFormat, typer.Option("--format", help="Format of --file.", rich_help_panel="Many prompts")
    ] = "auto"
    out: Annotated[
        Path | None,
        _several("Write results here, one JSON object per line, in the order of the prompts.", dir_okay=False),
    ] = None
    resume: Annotated[bool, _several("Continue after the results in --out.", "--resume")] = False
    concurrency: Annotated[
        int | None, _several("Requests at once. Default: the number of slots of the server.", min=1, max=4096)
    ] = None  # fmt: skip

    def check(self, is_one: bool) -> None:
        """Raise typer.BadParameter for an option without effect. `is_one`: for a single prompt."""
        if self.resume and self.out is None:
            raise typer.BadParameter("needs --out", param_hint="--resume")
        if self.file is not None and self.out is not None and _is_same_file(self.file, self.out):
            raise typer.BadParameter(f"{self.out} is the file of the prompts; give another one", param_hint="--out")
        if self.file_format != "auto" and self.file is None:
            raise typer.BadParameter("needs --file", param_hint="--format")
        if self.concurrency is not None and is_one:
            raise typer.BadParameter("needs several prompts", param_hint="--concurrency")

    def entries(self, prompts: Sequence[str], make: Callable[[Any], Request]) -> Entries:
        if self.file is None:
            return [Entry(make(prompt), {"prompt": prompt}) for prompt in prompts]
        return PromptFile(sys.stdin.buffer if str(self.file) == "-" else self.file, self.file_format, make)


def _is_same_file(prompts: Path, out: Path) -> bool:
    source = Path("/dev/stdin") if str(prompts) == "-" else prompts
    return out.is_file() and source.exists() and source.samefile(out)


def several(client: Client, entries: Entries, many: ManyPrompts, *, progress: bool) -> int:
    """Run all prompts, write one line of JSON for each in order, and return the number of failures.

    Raises the error of a server that is unavailable; --resume continues after the lines written. Raises DataLoss if
    the number of results differs from that of the prompts.
    """
    with _opened(many.out, many.resume) as results:
        prompts = iter(entries)
        have = results.check(itertools.islice(prompts, results.count))
        asked = _Asked(prompts, len(entries) - have)
        failed = 0
        outcomes = client.iter_batch(asked, concurrency=many.concurrency, progress=progress)
        with sigint.cancel_on_sigint(outcomes.cancel), closing(outcomes):
            for index, outcome in enumerate(outcomes, have):
                if isinstance(outcome, LineclearError):
                    if outcome.code == "UNAVAILABLE":
                        raise outcome
                    failed += 1
                    answer = {"error": exit_status.as_dict(outcome)}
                else:
                    answer = outcome.to_dict()
                results.write({"index": index, **asked.shown.popleft(), **answer})
                have += 1
        if have != len(entries) or asked.shown:
            raise DataLoss(f"{len(entries)} prompts were counted and {have} results written: the input has changed")
        return failed


def repeated(ask: Callable[[], T], interval_seconds: float, count: int | None) -> Iterator[T]:
    """Yield the result of `ask` every `interval_seconds`, `count` times or for ever."""
    for number in itertools.count() if count is None else range(count):
        if number:
            time.sleep(interval_seconds)
        yield ask()


class _Asked:
    """The requests of the prompts, and for each running one the fields to repeat in its result.

    The client reads the requests in a thread of its own; the thread that writes takes from `shown`, in the same order.
    """

    def __init__(self, entries: Iterator[Entry], count: int) -> None:
        self.shown: deque[dict[str, Any]] = deque()
        self._entries = entries
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        for entry in self._entries:
            self.shown.append(entry.shown)
            yield entry.request


@contextmanager
def _opened(out: Path | None, resume: bool) -> Iterator[_Results]:
    if out is None:
        yield _Results(sys.stdout)
        return
    earlier: list[int] = []
    if resume and out.exists():
        with out.open("rb") as file:
            earlier = [len(line) for line in file if line.endswith(b"\n")]
    with out.open("a" if resume else "w", encoding="utf-8") as results:
        yield _Results(results, out if resume else None, len(earlier), sum(earlier))


class _Results:
    """The file of the results. `count` lines, of `num_bytes`, are from an earlier run, whose file `path` is."""

    def __init__(self, file: TextIO, path: Path | None = None, count: int = 0, num_bytes: int = 0) -> None:
        self.count, self._num_bytes = count, num_bytes
        self._file, self._path = file, path

    def check(self, entries: Iterable[Entry]) -> int:
        """Drop a last result without an end, and return the number of earlier results.

        Raises typer.BadParameter, and changes nothing, if the file has something else, or results of other prompts.
        """
        if self._path is None:
            return 0
        with self._path.open("rb") as file:
            checked = -1
            for checked, (line, entry) in enumerate(zip(itertools.islice(file, self.count), entries, strict=False)):
                if not _begins(line, {"index": checked, **entry.shown}):
                    raise self._foreign(checked)
            if checked + 1 != self.count:
                text = f"{self._path} has {self.count} results and there are only {checked + 1} prompts"
                raise typer.BadParameter(text, param_hint="--resume")
            cut_off, beginning = file.read(), f'{{"index": {self.count}, '.encode()
        if not (cut_off.startswith(beginning) or beginning.startswith(cut_off)):
            raise self._foreign(self.count)
        self._file.truncate(self._num_bytes)
        return self.count

    def _foreign(self, index: int) -> typer.BadParameter:
        text = f"is not the result of prompt {index + 1}; the file has the results of other prompts"
        return typer.BadParameter(f"{self._path}, line {index + 1}: {text}", param_hint="--resume")

    def write(self, result: dict[str, Any]) -> None:
        self._file.write(output.json_line(result, self._file.encoding))
        self._file.flush()


def _begins(line: bytes, beginning: dict[str, Any]) -> bool:
    """Return whether a line is a JSON object with these entries."""
    try:
        found = json.loads(line)
    except ValueError:
        return False
    return isinstance(found, dict) and beginning.items() <= found.items()
