"""Writes the client for threads (`_sync`) from the client for asyncio (`_async`), as httpcore does.

    python client/generate_sources.py

The source awaits only what `concurrency.py` and `grpc_channel.py` have for both, so names are all there is to replace.
Also writes `call_params.py`, the keyword arguments of calls, from the table in `parameters.py`, and
`message_classes.py`, the responses with the fields of their messages, from the schema. Runs with every build and
install, and before the tests. git ignores what it writes.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent / "lineclear" / "client"
PROTO = PACKAGE.parents[2] / "protos/lineclear/v1/inference.proto"
SOURCE, GENERATED = PACKAGE / "_async", PACKAGE / "_sync"

HEADER = "# Generated from {source} by client/generate_sources.py. Do not edit.\n"
PARAMS = '''"""The keyword arguments of calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from .chat_messages import Tool, ToolChoice
from .parameters import EarlyStopping, JsonWhitespace, Metadata, OnModelChange, OnQueued, Repetition


class Params(TypedDict, total=False):
    """The keyword arguments of a call: the fields of `Sampling`, then those of `Request`."""

'''
CLASSES = '''"""Responses with the fields of their messages: the served model, statistics, figures of an answer."""

from __future__ import annotations

from dataclasses import dataclass
'''
CLASS_OF = {"GetModelResponse": "Model", "GetStatsResponse": "Stats"} | {
    name: name
    for name in ("Adapter", "Limits", "Counters", "Gauges", "Quantiles", "WorkerStatus", "WorkerStats", "TopLogprob",
                 "Started", "Usage", "Timings")
}  # fmt: skip
"""The class of each message."""
DEFAULTS = {"str": '""', "int": "0", "float": "0.0"}
WITH_DEFAULTS = ("Started", "Usage", "Timings")
TYPES = {"string": "str", "double": "float", "float": "float", "google.protobuf.Duration": "float"} | dict.fromkeys(
    ("uint32", "uint64", "int64"), "int"
)
REPLACEMENTS = [
    (r"any number of tasks of one event loop", "any number of threads"),
    (r"any thread or task", "any thread"),
    (r"The client for asyncio, and the source of `_sync`", "The client for threads"),
    (r"\b(async_)(?=sleep|call\b|read\b)", ""),
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
    return HEADER.format(source=f"_async/{name}") + text


def params() -> str:
    """Return the text of `call_params.py`."""
    tree = ast.parse((PACKAGE / "parameters.py").read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    lines = []
    for field in (*classes["Sampling"].body, *classes["Parameters"].body):
        if isinstance(field, ast.AnnAssign) and (name := ast.unparse(field.target)) not in ("prompt", "sampling"):
            kind = re.sub(r"^Annotated\[(.+), ['\"].*\]$", r"\1", ast.unparse(field.annotation))
            lines.append(f"    {name}: {kind.replace('Unset | ', '')}\n")
    return HEADER.format(source="parameters.py") + PARAMS + "".join(lines)


def message_classes() -> str:
    """Return `message_classes.py`: a dataclass for each message, with its comments. Durations are seconds."""
    proto, classes = PROTO.read_text(encoding="utf-8"), []
    for message, name in CLASS_OF.items():
        found = re.search(rf"((?://.*\n)+)message {message} {{\n((?:.*\n)*?)}}\n", proto)
        assert found is not None, message
        fields = re.findall(r"((?: *//.*\n)+) *(repeated |optional |)([\w.]+) (\w+) = \d+;", found[2])
        lines = [_documented(*field, has_default=name in WITH_DEFAULTS) for field in fields]
        head = f'\n\n@dataclass(frozen=True, slots=True)\nclass {name}:\n    """{_sentences(found[1])}"""\n\n'
        classes.append(head + "".join(lines))
    return HEADER.format(source=PROTO.name) + CLASSES + "".join(classes)


def _documented(comment: str, label: str, kind: str, name: str, *, has_default: bool) -> str:
    """Return a field of a message as that of a dataclass."""
    name += "_seconds" if kind.endswith("Duration") else ""
    kind = TYPES.get(kind) or CLASS_OF.get(kind, kind)
    default = f" = {DEFAULTS[kind]}" if has_default else ""
    kind = {"repeated ": f"tuple[{kind}, ...]", "optional ": f"{kind} | None"}.get(label, kind)
    return f'    {name}: {kind}{default}\n    """{_sentences(comment)}"""\n'


def _sentences(comment: str) -> str:
    return " ".join(comment.replace("//", " ").split()).replace('"', "`")


def main() -> None:
    """Write the files that are missing or have changed, and remove those without a source."""
    GENERATED.mkdir(exist_ok=True)
    names = {path.name for path in SOURCE.glob("*.py")}
    for path in GENERATED.glob("*.py"):
        if path.name not in names:
            path.unlink()
    for name in names:
        _write(GENERATED / name, generated(name))
    _write(PACKAGE / "call_params.py", params())
    _write(PACKAGE / "message_classes.py", message_classes())


def _write(path: Path, text: str) -> None:
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    part = path.with_suffix(f".{os.getpid()}.part")  # test processes may write at the same time
    part.write_text(text, encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    main()
