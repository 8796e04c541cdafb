"""Writes the client for threads (`_sync`) from the client for asyncio (`_async`), as httpcore does.

    python client/unasync.py [--out FOLDER]

The source awaits only what `concurrency.py` and `grpc_channel.py` have for both, so names are all there is to replace.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent / "lineclear" / "client"
SOURCE, GENERATED = PACKAGE / "_async", PACKAGE / "_sync"

KEPT = "# unasync: keep"
"""A line with this comment is not changed."""

HEADER = "# Generated from _async/{name} by client/unasync.py. Do not edit.\n"
REPLACEMENTS = [
    (r"any number of tasks of one event loop", "any number of threads"),
    (r"any thread or task", "any thread"),
    (r"The client for asyncio, and the source of `_sync`: after a change run `client/unasync\.py`",
     "The client for threads"),
    (r"_async\.", "_sync."),
    (r"\b(async_)(?=sleep|call\b)", ""),
    (r"\b(unary|stream|close)_async\b", r"\1"),
    (r"\basync (?=(def|with|for)\b)", ""),
    (r"\bawait ", ""),
    (r"\b__a(?=(enter|exit|iter|next)__)", "__"),
    (r"\ba(?=next\()", ""),
    (r"\baclos(?=(e\(|e`|ing))", "clos"),
    (r"\bStopAsyncIteration\b", "StopIteration"),
    (r"\basyncio\.Lock\b", "threading.Lock"),
    (r"^import asyncio$", "import threading"),
    (r"\bAsyncGenerator\[(.+), None\]", r"Generator[\1, None, None]"),
    (r"\bAwaitable\[int\]", "int"),
    (r"\bAsync(?=[A-Z])", ""),
]  # fmt: skip


def replaced(line: str) -> str:
    """Return a line of the source as the client for threads has it."""
    for pattern, replacement in REPLACEMENTS:
        line = re.sub(pattern, replacement, line)
    return line


def generated(name: str) -> str:
    """Return the text of a generated file."""
    lines = (SOURCE / name).read_text().splitlines(keepends=True)
    text = HEADER.format(name=name) + "".join(line if KEPT in line else replaced(line) for line in lines)
    ruff = [sys.executable, "-m", "ruff"]
    file = ["--stdin-filename", str(GENERATED / name), "-"]
    check = ["check", "-q", "--fix", "--unsafe-fixes", "--select", "I,F401,C416,SIM117,UP028"]
    for command in ([*ruff, *check, *file], [*ruff, "format", "-q", *file]):
        text = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    return text


def main(out: Path) -> None:
    """Write every generated file into `out`."""
    out.mkdir(exist_ok=True)
    for source in SOURCE.glob("*.py"):
        (out / source.name).write_text(generated(source.name))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=GENERATED)
    main(parser.parse_args().out)
