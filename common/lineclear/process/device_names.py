"""Names of devices in settings: auto, cpu, cuda, mps, a GPU as cuda:1, or cores of the CPU as cpu:0-3,8."""

from __future__ import annotations

import re

_DEVICE = re.compile(r"auto|cuda|mps|cpu|cuda:\d{1,3}|cpu:\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")
_RANGE = re.compile(r"(\d+)-(\d+)")


def check_device(name: str) -> str:
    """Return the name. Raises ValueError if it names no device."""
    if not _DEVICE.fullmatch(name) or any(int(first) > int(last) for first, last in _RANGE.findall(name)):
        raise ValueError(f"{name!r} is no device; give auto, cpu, cuda, mps, a GPU as cuda:1, or cores as cpu:0-3")
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
