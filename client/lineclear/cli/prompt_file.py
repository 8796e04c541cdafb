"""A file of prompts: lines of text, or of JSON with `prompt` or `messages` and any parameters.

Tell me a joke
{"id": "a1", "prompt": "Tell me a joke", "max_tokens": 32}
{"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

import typer

from lineclear.client.requests import REQUEST_FIELDS, SAMPLING_FIELDS, Request
from lineclear.errors import InvalidRequest

FileFormat: TypeAlias = Literal["auto", "text", "jsonl"]
"""The format of a file. auto: by its name, else by its first line."""
_OTHER_FORMAT = "--format text takes lines as they are"
_IN_MEMORY_BYTES = 1 << 20
_PARAMETERS = (SAMPLING_FIELDS | REQUEST_FIELDS) - {"metadata", "on_queued"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One prompt of the file: the request, and the fields to repeat in its result."""

    request: Request
    shown: dict[str, Any]


class PromptFile:
    """The prompts of a file or a stream. Allows `len()` and one iteration at a time.

    A pipe, a FIFO or a terminal is first copied to a temporary file. `make` converts a prompt to a request with the
    options of the command line. Raises typer.BadParameter with the number of an invalid line, before any request.
    """

    def __init__(self, source: Path | IO[bytes], form: FileFormat, make: Callable[[Any], Request]) -> None:
        self._make = make
        self._is_being_read = False
        suffix = ""
        if isinstance(source, Path):
            self._name, suffix = source.name, source.suffix
            self._open = _opener(source)
        else:
            self._name = "standard input"
            self._open = _spooled(source)
        self._json = form == "jsonl" or (form == "auto" and (suffix in (".jsonl", ".ndjson") or self._looks_json()))
        self._count = sum(1 for _ in self)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Entry]:
        for number, line in self._lines():
            try:
                entry = self._parsed(line)
                entry.request.to_proto()
            except (ValueError, TypeError, RecursionError, InvalidRequest) as error:
                raise typer.BadParameter(f"{self._name}, line {number}: {error}", param_hint="--file") from None
            yield entry

    def _lines(self) -> Generator[tuple[int, str], None, None]:
        if self._is_being_read:  # two iterations over one pipe would share its lines
            raise RuntimeError("the prompts allow one iteration at a time")
        self._is_being_read = True
        try:
            yield from self._read_lines()
        finally:
            self._is_being_read = False

    def _read_lines(self) -> Iterator[tuple[int, str]]:
        with self._open() as file:
            for number, line in enumerate(file, 1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                except UnicodeDecodeError:
                    where = f"{self._name}, line {number}"
                    raise typer.BadParameter(f"{where}: is not UTF-8", param_hint="--file") from None
                if text.strip():
                    yield number, text

    def _looks_json(self) -> bool:
        with closing(self._lines()) as all_lines:
            first = next(all_lines, (0, ""))[1]
        try:
            value = json.loads(first)
        except (ValueError, RecursionError):
            return False
        return isinstance(value, dict)  # an object without a prompt is more likely a mistake than a prompt

    def _parsed(self, line: str) -> Entry:
        if not self._json:
            return Entry(self._make(line), {"prompt": line})
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(f"is not JSON, {error}; {_OTHER_FORMAT}") from None
        if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
            raise ValueError(f"is not a JSON object with `prompt` or `messages`; {_OTHER_FORMAT}")
        shown = {name: value.pop(name) for name in ("id", "prompt", "messages") if name in value}
        if unknown := sorted(value.keys() - _PARAMETERS):
            raise ValueError(f"no such parameter: {', '.join(unknown)}")
        if isinstance(bias := value.get("logit_bias"), dict):
            value["logit_bias"] = {int(token): weight for token, weight in bias.items()}  # JSON keys are strings
        prompt = shown["prompt"] if "prompt" in shown else shown["messages"]
        return Entry(Request.of(self._make(prompt), **value), shown)


def _opener(path: Path) -> Callable[[], AbstractContextManager[IO[bytes]]]:
    """Return a function that opens the prompts. Only a regular file can be opened twice."""
    with path.open("rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return _spooled(file)
    return lambda: path.open("rb")


def _spooled(source: IO[bytes]) -> Callable[[], AbstractContextManager[IO[bytes]]]:
    """Copy `source` and return a function that opens the copy."""
    copy = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES)  # noqa: SIM115 - closed at exit
    shutil.copyfileobj(source, copy)

    @contextmanager
    def opened() -> Iterator[IO[bytes]]:
        copy.seek(0)
        yield copy

    return opened
