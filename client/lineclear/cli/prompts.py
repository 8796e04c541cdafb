"""A file of prompts: one a line, or a JSON object a line with `prompt` and any parameters. Checked before it is used.

Tell me a joke
{"id": "a1", "prompt": "Tell me a joke", "max_tokens": 32}
{"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import typer

from lineclear.client.requests import REQUEST_FIELDS, SAMPLING_FIELDS, Request
from lineclear.errors import InvalidRequest

_IN_MEMORY_BYTES = 1 << 20
_PARAMETERS = (SAMPLING_FIELDS | REQUEST_FIELDS) - {"metadata"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One prompt of the file: the request, and what to repeat in its result."""

    request: Request
    shown: dict[str, Any]


class PromptFile(Collection[Entry]):
    """The prompts of a file or of a stream; `len()` of them, and iterating any number of times.

    `make` turns a prompt into a request with what the command line says. Raises typer.BadParameter, naming the line,
    if any line is wrong: nothing has been asked then.
    """

    def __init__(self, source: Path | IO[bytes], form: str, make: Callable[[Any], Request]) -> None:
        self._make = make
        if isinstance(source, Path):
            self._name = source.name
            self._open: Callable[[], AbstractContextManager[IO[bytes]]] = lambda: source.open("rb")
            suffix = source.suffix
        else:
            self._name, suffix = "standard input", ""
            kept = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES)  # noqa: SIM115 - read twice, closed at exit
            shutil.copyfileobj(source, kept)
            self._open = lambda: _again(kept)
        self._json = form == "jsonl" or (form == "auto" and (suffix in (".jsonl", ".ndjson") or self._looks_json()))
        self._count = sum(1 for _ in self)

    def __contains__(self, entry: object) -> bool:
        return any(entry == own for own in self)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Entry]:
        for number, line in self._lines():
            try:
                entry = self._parsed(line)
                entry.request.to_proto()
            except (ValueError, TypeError, InvalidRequest) as error:
                raise typer.BadParameter(f"{self._name}, line {number}: {error}", param_hint="--file") from None
            yield entry

    def _lines(self) -> Iterator[tuple[int, str]]:
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
        first = next(self._lines(), (0, ""))[1]
        try:
            value = json.loads(first)
        except ValueError:
            return False
        return isinstance(value, dict)  # one without a prompt is a mistake, more likely than a prompt

    def _parsed(self, line: str) -> Entry:
        if not self._json:
            return Entry(self._make(line), {"prompt": line})
        value = json.loads(line)
        if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
            raise ValueError("is not a JSON object with `prompt` or `messages`; --format text takes lines as they are")
        shown = {name: value.pop(name) for name in ("id", "prompt", "messages") if name in value}
        if unknown := sorted(value.keys() - _PARAMETERS):
            raise ValueError(f"there is no parameter {', '.join(unknown)}")
        if isinstance(bias := value.get("logit_bias"), dict):
            value["logit_bias"] = {int(token): weight for token, weight in bias.items()}  # JSON keys are texts
        prompt = shown["prompt"] if "prompt" in shown else shown["messages"]
        return Entry(Request.of(self._make(prompt), **value), shown)


@contextmanager
def _again(file: IO[bytes]) -> Iterator[IO[bytes]]:
    file.seek(0)
    yield file
