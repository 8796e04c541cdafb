"""Runs all micro-benchmarks one after another, each in its own process, and writes their figures and one page.

python -m bench.micro --model DIR [--only core wire]
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from bench.compare import REPOSITORY
from bench.figures import Figure, table
from bench.report import RESULTS

BENCHMARKS = {
    "core": ("micro_core", False),
    "counts": ("micro_counts", False),
    "wire": ("micro_wire", False),
    "ipc": ("micro_ipc", False),
    "streams": ("micro_streams", True),
    "session": ("micro_session", True),
    "short": ("micro_short", True),
    "step": ("micro_step", True),
    "attention": ("micro_attention", False),
    "idle": ("idle", True),
    "ready": ("ready", True),
    "limits": ("limits", True),
}
"""Name: (module, whether it has --model)."""


def command(name: str, model: Path, out: Path) -> list[str]:
    """Return the command of one benchmark."""
    module, needs_model = BENCHMARKS[name]
    return [sys.executable, "-m", f"bench.{module}", "--out", str(out), *(["--model", str(model)] * needs_model)]


def read(path: Path) -> list[Figure]:
    """Return the figures of a file; a later one replaces one of the same name and case."""
    names = [field.name for field in fields(Figure)]
    found = {}
    for line in path.read_text().splitlines():
        raw = json.loads(line)
        found[raw["name"], raw["case"]] = Figure(**{name: raw[name] for name in names})
    return list(found.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks; return 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=sorted(BENCHMARKS), default=list(BENCHMARKS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    o = parser.parse_args(arguments)
    o.results.mkdir(parents=True, exist_ok=True)
    name = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-micro-{o.model.resolve().name}"
    out = (o.results / f"{name}.jsonl").resolve()
    failed = []
    for only in o.only:
        print(f"--- {only}", flush=True)
        if subprocess.run(command(only, o.model.resolve(), out), cwd=REPOSITORY).returncode:
            failed.append(only)
    if out.exists():
        last = json.loads(out.read_text().splitlines()[-1])
        machine = ", ".join(f"{key} {value}" for key, value in last["machine"].items())
        page = f"# Micro-benchmarks, {o.model.resolve().name}\n\nMachine: {machine}. Commit {last['commit']}.\n\n"
        out.with_suffix(".md").write_text(page + table(read(out)) + "\n")
    if failed:
        print(f"FAILED: {' '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
