"""Where a worker runs: its device and, on a CPU, its cores.

Several workers of one machine divide it. Each takes a GPU of its own, or the cores of its own NUMA nodes, where its
memory then lies too, because Linux allocates a page on the node of the thread that touches it first. On a machine with
one node they divide the cores evenly. Hardware threads of one core stay together.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lineclear.process.settings_base import ConfigurationError

_NODES = Path("sys/devices/system/node")
_CPUS = Path("sys/devices/system/cpu")
_FIRST_GPU = _GPU_BYTES = 1 << 20
"""Of the file with the marks: each GPU has a range of bytes, of which a worker locks its share."""
_SHARE = re.compile(r"(\d{1,3})/([1-9]\d{0,2})")


@dataclass(frozen=True, slots=True)
class MachineShare:
    """Part `index` of `count` equal parts of the machine."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> MachineShare:
        """Return the share of "0/2". Raises ValueError."""
        found = _SHARE.fullmatch(text)
        if found is None or int(found[1]) >= int(found[2]):
            raise ValueError("give INDEX/COUNT with INDEX from 0 to COUNT - 1, such as 0/2")
        return cls(int(found[1]), int(found[2]))

    def of_one(self, num_devices: int) -> MachineShare:
        """Return which part of a device its worker takes if the shares take the devices in turn."""
        return MachineShare(self.index // num_devices, len(range(self.index % num_devices, self.count, num_devices)))


def named_cores(device: str) -> frozenset[int]:
    """Return the cores in a device name as cpu:0-3,8; empty for other names."""
    kind, _, cores = device.partition(":")
    return _cores(cores) if kind == "cpu" else frozenset()


def cores_of(share: MachineShare, usable: Iterable[int], root: Path = Path("/")) -> frozenset[int]:
    """Return the cores of a share of the `usable` ones: whole NUMA nodes if they suffice, else part of a node."""
    cores = frozenset(usable)
    nodes = [node for node in (cores & node for node in _nodes(root)) if node] or [cores]
    index, count = share.index, share.count
    if count <= len(nodes):
        return frozenset().union(*nodes[index * len(nodes) // count : (index + 1) * len(nodes) // count])
    on_node = [other for other in range(count) if other * len(nodes) // count == index * len(nodes) // count]
    return _part(_siblings(nodes[index * len(nodes) // count], root), index - on_node[0], len(on_node))


def bind(cores: frozenset[int]) -> None:
    """Let all threads of this process run on `cores` only. Raises ConfigurationError for one that it may not use."""
    lacking = cores - os.sched_getaffinity(0)
    if lacking:
        raise ConfigurationError(
            f"--device cpu:... names core {min(lacking)}, which this process may not use; usable are"
            f" {core_list(os.sched_getaffinity(0))}"
        )
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cores)


def claim(directory: Path, cores: Iterable[int] = (), gpu: str = "", share: MachineShare = MachineShare()) -> list[str]:
    """Mark cores, or a share of a GPU, as used by this process until its end; return those that another one has marked.

    The marks are locks on bytes of a file in the directory of the sockets: workers of one scheduler see each other's.
    """
    places = {core: (f"core {core}", 1) for core in cores}
    if gpu:
        first = _FIRST_GPU + zlib.crc32(gpu.encode()) * _GPU_BYTES
        start, end = (first + index * _GPU_BYTES // share.count for index in (share.index, share.index + 1))
        places = {start: (gpu, end - start)}
    try:
        file = _locks(directory)
    except OSError:  # the directory is made later, or refused with a reason
        return []
    taken = []
    for start, (name, length) in sorted(places.items()):
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        except OSError:
            taken.append(name)
    return taken


@cache
def _locks(directory: Path) -> int:
    """Return the descriptor of the file with the marks. It is never closed: that would drop them."""
    return os.open(directory / "devices.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _nodes(root: Path) -> list[frozenset[int]]:
    """Return the cores of each NUMA node; nodes of memory alone have none."""
    folders = sorted(root.glob(f"{_NODES}/node[0-9]*"), key=lambda folder: int(folder.name.removeprefix("node")))
    return [_cores(_read(folder / "cpulist")) for folder in folders]


def _siblings(cores: frozenset[int], root: Path) -> list[frozenset[int]]:
    """Return the hardware threads of each physical core."""
    found = (_cores(_read(root / _CPUS / f"cpu{core}/topology/thread_siblings_list")) & cores for core in cores)
    return sorted({group or frozenset((core,)) for core, group in zip(cores, found, strict=True)}, key=min)


def _part(groups: Sequence[frozenset[int]], index: int, count: int) -> frozenset[int]:
    """Return one of `count` equal parts; parts share a core if they outnumber the cores."""
    if count > len(groups):
        return groups[index % len(groups)]
    return frozenset().union(*groups[index * len(groups) // count : (index + 1) * len(groups) // count])


def _cores(text: str) -> frozenset[int]:
    """Return the numbers of a list as the kernel writes it: 0-3,8."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def core_list(cores: Iterable[int]) -> str:
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ranges)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
