"""The GPU of a worker: by number, UUID or MIG instance.

A process sees one MIG instance only, the first of CUDA_VISIBLE_DEVICES. So a worker leaves only its own in that list.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import structlog
import torch

from lineclear.process.settings_base import ConfigurationError

from .machine_share import MachineShare, claim

log = structlog.get_logger(__name__)

_LISTS = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")  # the second one is that of containers
_CLAIM_SECONDS, _PAUSE_SECONDS = 60.0, 0.25  # a worker that stops drains for half of it by default


def visible_instances() -> list[str]:
    """Return the UUIDs of the MIG instances that this process may use; empty without MIG."""
    given = next((os.environ[name] for name in _LISTS if name in os.environ), "")
    return [name.strip() for name in given.split(",") if name.strip().startswith("MIG-")]


def keep_instance(place: str, share: MachineShare) -> tuple[str, MachineShare]:
    """Leave this process the MIG instance at `place`, else that of the share, before CUDA starts.

    Return its UUID, and which part of it this worker takes; both arguments without MIG. Raises ConfigurationError if
    the process may not use it.
    """
    names = visible_instances()
    if place.startswith("GPU-") or not (names or place.startswith("MIG-")):
        return place, share
    if not place:
        place, share = names[share.index % len(names)], share.of_one(len(names))
    elif place.isdecimal() and int(place) < len(names):
        place = names[int(place)]
    elif place not in names and (names or _LISTS[0] in os.environ):
        given = ", ".join(names) or f"{_LISTS[0]}={os.environ[_LISTS[0]]}"
        raise ConfigurationError(f"--device cuda:{place}: this process may use {given} only")
    os.environ[_LISTS[0]] = place
    return place, share


def choose_gpu(place: str, share: MachineShare) -> tuple[torch.device, MachineShare]:
    """Return the GPU of this number or UUID, else the share's, and its part of it. Raises ConfigurationError."""
    num_gpus = torch.cuda.device_count()
    if place.startswith("GPU-"):
        uuids = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(num_gpus)]
        # As CUDA, by any unique beginning.
        found = [index for index, uuid in enumerate(uuids) if uuid.startswith(place)]
        if len(found) != 1:
            problem = f"that is {len(found)} of the GPUs of this process, {', '.join(uuids)}"
            raise ConfigurationError(f"--device cuda:{place}: {problem}")
        return torch.device("cuda", found[0]), share
    if place.isdecimal():
        if int(place) >= num_gpus:
            raise ConfigurationError(f"--device cuda:{place}: this machine has {num_gpus} GPUs, counted from 0")
        return torch.device("cuda", int(place)), share
    if share.count == 1 or place:
        return torch.device("cuda"), share
    return torch.device("cuda", share.index % num_gpus), share.of_one(num_gpus)


def uuid_of(device: torch.device) -> str:
    """Return the UUID of a GPU or MIG instance as nvidia-smi writes it; empty if it is unknown."""
    if names := visible_instances():
        return names[0]
    properties = torch.cuda.get_device_properties(device)
    # Of a MIG instance, CUDA may return the UUID of its GPU.
    return "" if " MIG " in properties.name else f"GPU-{properties.uuid}"


def device_name(device: torch.device) -> str:
    """Return the name of a device; of a GPU with its UUID, as `nvidia-smi -L` has both."""
    if device.type != "cuda":
        return device.type
    name, uuid = torch.cuda.get_device_name(device), uuid_of(device)
    return f"{name} ({uuid})" if uuid else name


def claim_gpu(directory: Path, device: torch.device, share: MachineShare) -> None:
    """Take a part of a GPU once no worker of this scheduler has it. Raises ConfigurationError after a minute."""
    uuid, ends_at = uuid_of(device), 0.0
    while uuid and claim(directory, gpu=uuid, share=share):
        if not ends_at:
            log.warning("waiting_for_device", device=uuid, hint="another worker of this scheduler holds it")
            ends_at = time.monotonic() + _CLAIM_SECONDS
        elif time.monotonic() > ends_at:
            raise ConfigurationError(
                f"another worker of this scheduler has held {uuid} for {_CLAIM_SECONDS:g} s; give each its own by"
                " --device, or a part of it by --machine-share"
            )
        time.sleep(_PAUSE_SECONDS)
