"""Names of devices in settings: auto, cpu, cuda, mps, a GPU as cuda:1 or by UUID, or cores of the CPU as cpu:0-3,8."""

from __future__ import annotations

import re

_CORES = r"\d{1,4}(-\d{1,4})?"
_DEVICE = re.compile(rf"auto|mps|cuda(:(\d{{1,3}}|(GPU|MIG)-[\w/-]{{4,99}}))?|cpu(:{_CORES}(,{_CORES})*)?", re.ASCII)
_RANGE = re.compile(r"(\d+)-(\d+)")


def check_device(name: str) -> str:
    """Return the name. Raises ValueError if it names no device."""
    ranges = _RANGE.findall(name) if name.startswith("cpu:") else ()
    if not _DEVICE.fullmatch(name) or any(int(first) > int(last) for first, last in ranges):
        raise ValueError(
            f"{name!r} is no device; give auto, cpu, cuda, mps, a GPU as cuda:1 or cuda:GPU-<UUID>, or cores as cpu:0-3"
        )
    return name


def split_devices(names: str) -> list[str]:
    """Return the devices of a list, such as `cuda:0,cuda:1` or `cpu:0-3,8,cpu:4-7`. Raises ValueError."""
    devices: list[str] = []
    for part in filter(None, names.split(",")):
        if part[0].isdigit() and devices:  # further cores of the same device
            devices[-1] += f",{part}"
        else:
            devices.append(part)
    return [check_device(device) for device in devices]
