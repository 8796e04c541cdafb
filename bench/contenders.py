"""Contenders of a comparison: the environment and the command of one run of each.

To add a contender: an entry in `CONTENDERS`.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

PEERS = ("transformers", "vllm", "llama", "openvino", "ctranslate2")


@dataclass(frozen=True)
class Task:
    """One run: model, workload, and concurrency (0: requests at their arrival times)."""

    home: Path
    model: Path
    work: Path
    kind: str
    concurrency: int
    out: Path

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of every driver."""
        options = ["--model", str(self.model), "--work", str(self.work), "--out", str(self.out)]
        return [*options, "--concurrency", str(self.concurrency)]


@dataclass(frozen=True)
class Contender:
    """`peer`: its environment; empty for lineclear's. `command(task)`: the command of one run."""

    name: str
    peer: str
    command: Callable[[Task], list[str]]

    def libraries(self, home: Path) -> list[Path]:
        """Return shared libraries to preload, as its authors recommend."""
        iomp = home / "vllm" / "lib" / "libiomp5.so"
        return [iomp] if self.peer == "vllm" and iomp.exists() else []


def lineclear(name: str, flags: Sequence[str] = (), worker_flags: Sequence[str] = ()) -> Contender:
    """Return a contender that is lineclear with these flags."""

    def command(task: Task) -> list[str]:
        mine = [sys.executable, "-m", "bench.lineclear_serve", *task.arguments, "--name", name]
        return [*mine, "--", *flags, "--", *worker_flags]

    return Contender(name, "", command)


def custom(description: str) -> Contender:
    """Parse `NAME=SCHEDULER FLAGS [-- WORKER FLAGS]`. Raises ValueError."""
    name, equals, flags = description.partition("=")
    if not name or not equals:
        raise ValueError(f"{description!r} is not NAME=FLAGS")
    words = shlex.split(flags)
    place = words.index("--") if "--" in words else len(words)
    return lineclear(name, words[:place], words[place + 1 :])


def _lineclear_gguf(quantize: str) -> Contender:
    """Return lineclear on the GGUF file that `llama-QUANTIZE` reads."""
    mine = lineclear(f"lineclear-{quantize}")

    def command(task: Task) -> list[str]:
        words = mine.command(task)
        place = words.index("--")
        return [*words[:place], "--gguf", quantize, "--home", str(task.home), *words[place:]]

    return Contender(mine.name, "llama", command)


def _peer(name: str, *options: str) -> Contender:
    """Return a contender whose driver runs in the environment that its name begins with."""
    peer = name.partition("-")[0]

    def command(task: Task) -> list[str]:
        python = str(task.home / peer / "bin" / "python")
        # Requests that arrive over time need vLLM's server; for the others its own loop, without one, is faster.
        server = ["--server"] if peer == "vllm" and task.kind in ("w3", "w5") else []
        return [python, "-m", f"bench.peer_{peer}", *task.arguments, *options, *server]

    return Contender(name, peer, command)


def _llama(name: str, *options: str) -> Contender:
    def command(task: Task) -> list[str]:
        mine = [sys.executable, "-m", "bench.peer_llama", "--home", str(task.home), *task.arguments]
        return [*mine, *options]

    return Contender(name, "llama", command)


_FILES = ("f16", "q8_0", "q4_0", "q4_k_m")
_ALL = (
    lineclear("lineclear"),
    lineclear("lineclear-int8", worker_flags=("--quantization", "int8")),
    lineclear("lineclear-int4", worker_flags=("--quantization", "int4")),
    *map(_lineclear_gguf, _FILES),
    lineclear("lineclear-8-slots", ("--max-batch-size", "8")),
    lineclear("lineclear-8-slots-static", ("--max-batch-size", "8", "--batching-strategy", "fixed_size")),
    _peer("transformers"),
    _peer("transformers-waves-8", "--waves", "8"),
    _peer("transformers-waves-32", "--waves", "32"),
    _peer("vllm"),
    _peer("vllm-float32", "--dtype", "float32"),
    _llama("llama"),
    _llama("llama-64", "--slots", "64"),
    *(_llama(f"llama-{quantize}", "--quantize", quantize) for quantize in _FILES),
    _peer("openvino"),
    _peer("openvino-int8", "--weights", "int8"),
    _peer("openvino-int4", "--weights", "int4"),
    _peer("ctranslate2"),
    _peer("ctranslate2-int8", "--weights", "int8"),
)
CONTENDERS = {contender.name: contender for contender in _ALL}
