"""Everything that is measured on the day there is a GPU: one command, within a time, without a network.

    make bench-gpu                       # on a card; or: python -m bench.gpu --device cuda
    make bench-gpu DEVICE=cpu            # the rehearsal: the same path on a CPU, with small sizes

Each part is a process of its own. A part that fails, or does not end, is recorded with its error, and the rest goes on.
A part for which too little time is left is recorded as left out. Results are one JSON file and a page made from it.
Standard library only, so that missing packages become a sentence.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench import gpu_report, workloads
from bench.gpu_sizes import FAMILIES, Sizes, sizes_of
from bench.measure import commit, machine, versions

REPOSITORY = Path(__file__).resolve().parents[1]
ROOTS = ("protos", "common", "scheduler_svc", "gpu_worker", "client", "tools", "embedded")
BUDGET_SECONDS = 525.0  # of nine minutes
_LAST_LINES = 40


@dataclass(frozen=True)
class Context:
    """What the commands of the parts need."""

    device: str
    folder: Path
    sizes: Sizes

    @property
    def served(self) -> Path:
        """The directory of the served model."""
        return self.folder / "models" / self.sizes.served_shape

    @property
    def small(self) -> Path:
        """The directory of the model whose worker is killed."""
        return self.folder / "models" / "llama"


@dataclass(frozen=True)
class Part:
    """A command. `seconds`: the most that it may take. `least`: it is left out if less is left."""

    name: str
    seconds: float
    least: float
    commands: Callable[[Context], list[list[str]]]
    """They run at the same time. `OUT`, `RUNS` and `FACTS` in them are files for figures, results and the device."""
    package: str = ""
    """Left out where it is not installed."""


@dataclass
class Outcome:
    """What became of a part. `state`: done, failed, or left out."""

    name: str
    state: str
    seconds: float = 0.0
    error: str = ""
    figures: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)


def _bench(module: str, *arguments: str) -> Callable[[Context], list[list[str]]]:
    def commands(context: Context) -> list[list[str]]:
        return [["-m", f"bench.{module}", "--device", context.device, "--out", "OUT", *arguments]]

    return commands


def _models(context: Context) -> list[list[str]]:
    out = ["--out", str(context.folder / "models"), "--device", context.device]
    return [["-m", "bench.models", *out, "--only", context.sizes.served_shape, "--family", "llama"]]


def _equality(context: Context) -> list[list[str]]:
    return [[*command, "--family", name] for name in FAMILIES for command in _bench("gpu_equality")(context)]


def _load(context: Context) -> list[list[str]]:
    return _bench("gpu_load", "--model", str(context.served), "--runs", "RUNS")(context)


def _faults(context: Context) -> list[list[str]]:
    return _bench("gpu_faults", "--model", str(context.small))(context)


def _work(context: Context, module: str, *arguments: str) -> list[list[str]]:
    work = context.folder / "w1.json"
    workloads.save(context.sizes.workload("w1", seed=0), work)
    return [["-m", f"bench.{module}", "--model", str(context.served), "--work", str(work), "--out", "RUNS", *arguments]]


def _transformers(context: Context) -> list[list[str]]:
    # Its own choice of sizes needs a card, whose memory it divides.
    return _work(context, "peer_transformers", "--device", context.device, *(["--auto"] * (context.device != "cpu")))


def _vllm(context: Context) -> list[list[str]]:
    return _work(context, "peer_vllm", "--seqs", str(context.sizes.requests), "--batch-tokens", "8192")


PARTS = (
    Part("device", 40, 20, _bench("gpu_device", "--facts", "FACTS")),
    Part("models", 60, 30, _models),
    Part("equality", 150, 40, _equality),
    Part("steps", 150, 60, _bench("gpu_steps")),
    Part("served", 120, 50, _load),
    Part("faults", 90, 40, _faults),
    Part("transformers", 90, 40, _transformers),
    Part("vllm", 120, 60, _vllm, package="vllm"),
)


def run(part: Part, context: Context, environment: dict[str, str], seconds: float) -> Outcome:
    """Run a part for at most `seconds`; read what it has measured, even if it fails."""
    began_at = time.monotonic()
    folder = context.folder / part.name
    folder.mkdir()
    files = {"OUT": str(folder / "figures"), "RUNS": str(folder / "runs"), "FACTS": str(context.folder / "facts")}
    log = folder / "log"
    try:
        with log.open("w") as file:
            error = _run_all([[files.get(x, x) for x in c] for c in part.commands(context)], environment, file, seconds)
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    if error:
        last = log.read_text(errors="replace").splitlines()[-_LAST_LINES:] if log.exists() else []
        error = "\n".join([error, *last])
    figures, runs = (_lines(Path(files[name])) for name in ("OUT", "RUNS"))
    return Outcome(part.name, "failed" if error else "done", time.monotonic() - began_at, error, figures, runs)


def _run_all(commands: Sequence[Sequence[str]], environment: dict[str, str], log: Any, seconds: float) -> str:
    """Run commands at the same time. Return what went wrong; empty if nothing did."""
    give_up_at, errors = time.monotonic() + seconds, []
    processes = [
        subprocess.Popen(
            [sys.executable, *command], cwd=REPOSITORY, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        for command in commands
    ]
    for process in processes:
        try:
            if code := process.wait(max(0.1, give_up_at - time.monotonic())):
                errors.append(f"{' '.join(map(str, process.args))} ended with exit code {code}")  # type: ignore[arg-type]
        except subprocess.TimeoutExpired:
            errors.append(f"it did not end within {seconds:.0f} s")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # servers that a failed part has left
        process.wait()
    return "; ".join(errors)


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):  # a process that was killed may have written half of its last line
            found.append(json.loads(line))
    return found


def run_all(parts: Sequence[Part], context: Context, environment: dict[str, str], budget: float) -> Iterator[Outcome]:
    """Run all parts for which there is time, in order. Yields what became of each at once."""
    ends_at = time.monotonic() + budget
    for part in parts:
        left = ends_at - time.monotonic()
        if part.package and importlib.util.find_spec(part.package) is None:
            outcome = Outcome(part.name, "left out", error=f"{part.package} is not installed")
        elif left < part.least:
            outcome = Outcome(part.name, "left out", error=f"{left:.0f} s were left, and it needs {part.least:.0f} s")
        else:
            print(f"--- {part.name}, at most {min(left, part.seconds):.0f} s", flush=True)
            outcome = run(part, context, environment, min(left, part.seconds))
        print(f"{part.name}: {outcome.state} after {outcome.seconds:.0f} s {outcome.error}".rstrip(), flush=True)
        yield outcome


# --- an environment without installation ---------------------------------------------------------------------------


def absent_packages() -> list[str]:
    """Return the packages of a server that are not installed, as pyproject.toml names them."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["cli"], *extras["scheduler"], *extras["worker"]]
    absent = []
    for requirement in wanted:
        name = requirement.split(";")[0].split("[")[0].split(">")[0].split("=")[0].strip()
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.distribution(name)
            continue
        if name != "lineclear":
            absent.append(name)
    return sorted(set(absent))


def prepare(folder: Path) -> dict[str, str]:
    """Return the environment of the parts: the sources of the tree, and the metadata of an installation."""
    subprocess.run([sys.executable, REPOSITORY / "client/generate_sources.py"], check=True)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    site = folder / "site" / f"{project['name']}-{project['version']}.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    paths = [str(site.parent), str(REPOSITORY), *(str(REPOSITORY / root) for root in ROOTS)]
    paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    # Nothing is asked of a network; the caches of compiled kernels stay where they are.
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"} | offline


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu for the rehearsal")
    parser.add_argument("--budget-seconds", type=float, default=BUDGET_SECONDS)
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="parts; default: all")
    parser.add_argument(
        "--results", type=Path, help="folder; default: bench/results, and build/bench for the rehearsal"
    )
    o = parser.parse_args(arguments)
    is_rehearsal = o.device == "cpu"
    results = o.results or REPOSITORY / ("build/bench/gpu-rehearsal" if is_rehearsal else "bench/results")
    date, began_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), time.monotonic()
    if absent := absent_packages():
        print(
            f"These packages are not installed, and there may be no network here: {' '.join(absent)}.\n"
            "Bring them as wheels, unpack them into a folder (pip install --no-index --no-deps --target FOLDER *.whl)"
            " and run again with PYTHONPATH=FOLDER."
        )
        return 1
    with tempfile.TemporaryDirectory(prefix="lineclear-gpu-") as name:
        folder = Path(name)
        context = Context(o.device, folder, sizes_of(o.device))
        environment = prepare(folder)
        parts = [part for part in PARTS if o.only is None or part.name in o.only]
        outcomes = list[Outcome]()
        for outcome in run_all(parts, context, environment, o.budget_seconds):
            outcomes.append(outcome)
            report = {
                "date": date,
                "commit": commit(),
                "is_rehearsal": is_rehearsal,
                "device": next(iter(_lines(folder / "facts")), {}),
                "machine": machine(),
                "versions": versions(),
                "budget_seconds": o.budget_seconds,
                "seconds": round(time.monotonic() - began_at, 1),
                "parts": [asdict(outcome) for outcome in outcomes],
            }
            path = gpu_report.write(report, results)  # after each part: this process may be ended from outside
    print(f"{path} and {path.with_suffix('.md').name}, after {report['seconds']:.0f} s")
    return int(any(outcome.state == "failed" for outcome in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
