"""Writes the client for threads (`_sync`) from the client for asyncio (`_async`), as httpcore does.

    python client/generate_sources.py

Runs with every build and install, and before the tests. git ignores what it writes. The source awaits only what
`concurrency.py` and `grpc_channel.py` have for both, so names are all there is to replace.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent / "lineclear" / "client"
SOURCE, GENERATED = PACKAGE / "_async", PACKAGE / "_sync"

HEADER = "# Generated from _async/{name} by client/generate_sources.py. Do not edit.\n"
REPLACEMENTS = [
    (r"any number of tasks of one event loop", "any number of threads"),
    (r"any thread or task", "any thread"),
    (r"The client for asyncio, and the source of `_sync`", "The client for threads"),
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


def generated(name: str) -> str:
    """Return the text of a generated file."""
    text = (SOURCE / name).read_text(encoding="utf-8")
    for pattern, replacement in REPLACEMENTS:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return HEADER.format(name=name) + text


def main() -> None:
    """Write the files that are missing or have changed, and remove those without a source."""
    GENERATED.mkdir(exist_ok=True)
    names = {path.name for path in SOURCE.glob("*.py")}
    for path in GENERATED.glob("*.py"):
        if path.name not in names:
            path.unlink()
    for name in names:
        _write(GENERATED / name, generated(name))


def _write(path: Path, text: str) -> None:
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    part = path.with_suffix(f".{os.getpid()}.part")  # test processes may write at the same time
    part.write_text(text, encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    main()
