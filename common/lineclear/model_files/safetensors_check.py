"""Checks the safetensors files of a checkpoint before they are loaded.

A truncated file or a wrong header must end the start with the name of the file and the fault. Only headers are read, of
*.safetensors files and of the index beside them; no other file is opened for weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 * 1000 * 1000
_MAX_INDEX_BYTES = 100 * 1000 * 1000
_MAX_DIMENSIONS = 64  # PyTorch's limit; the product of a million sizes would take too long
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
_BY_BITS = {
    64: ("F64", "I64", "U64", "C64"),
    32: ("F32", "I32", "U32"),
    16: ("F16", "BF16", "I16", "U16"),
    8: ("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
    4: ("F4",),
}
_BITS = {dtype: bits for bits, dtypes in _BY_BITS.items() for dtype in dtypes}


class CheckpointBroken(Exception):
    """The checkpoint is incomplete or damaged; the message names the file and the fault."""


class Tensor(NamedTuple):
    """A tensor of a file; its bytes are [start, end) of the data behind the header."""

    start: int
    end: int
    name: str
    dtype: str
    shape: list[int]


def check_weights(directory: Path) -> None:
    """Check that every weight file is complete and holds the tensors in the index. Raises CheckpointBroken."""
    if (directory / SINGLE).is_file():
        tensors_of(directory / SINGLE)
    elif (directory / INDEX).is_file():
        _check_shards(directory, _index(directory / INDEX))
    elif any(directory.glob("*.safetensors")):
        raise CheckpointBroken(f"there are *.safetensors files, but neither {SINGLE} nor {INDEX}, which are read")
    elif any(path.suffix in _PICKLES for path in directory.iterdir()):
        raise CheckpointBroken(
            "the weights are pickle files, which can run code when read; convert them to safetensors"
        )
    else:
        raise CheckpointBroken("the directory has no *.safetensors weights")


def _check_shards(directory: Path, index: Mapping[str, str]) -> None:
    expected: dict[str, set[str]] = {}
    for tensor, file in index.items():
        expected.setdefault(file, set()).add(tensor)
    for file, names in sorted(expected.items()):
        if not (directory / file).is_file():
            raise CheckpointBroken(f"{file} is missing, {len(names)} tensors are in it; the download may be incomplete")
        missing = sorted(names - {tensor.name for tensor in tensors_of(directory / file)})
        if missing:
            raise CheckpointBroken(f"{file} lacks {len(missing)} tensors that {INDEX} says are there, as {missing[0]}")


def _index(path: Path) -> Mapping[str, str]:
    if path.stat().st_size > _MAX_INDEX_BYTES:
        raise CheckpointBroken(f"{path.name} is larger than {_MAX_INDEX_BYTES} bytes")
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise CheckpointBroken(f"{path.name} is not JSON") from None
    weight_map = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointBroken(f"{path.name} has no weight_map")
    for file in weight_map.values():
        # A file name without a path, so that an index cannot point to another directory.
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointBroken(f"{path.name} names a file that is no *.safetensors beside it")
    return weight_map


def tensors_of(path: Path) -> list[Tensor]:
    """Return the tensors of a file by offset. Raises CheckpointBroken unless they cover the whole file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointBroken(f"{path.name} has {size} bytes, fewer than its header; it is cut short")
        if length > MAX_HEADER_BYTES:
            raise CheckpointBroken(f"{path.name} has a header of {length} bytes, more than {MAX_HEADER_BYTES}")
        raw = file.read(length)
    return check_header(path.name, raw, size - 8 - length)


def check_header(file: str, raw: bytes, size: int) -> list[Tensor]:
    """Return the tensors of a header by offset. Raises CheckpointBroken unless they cover `size` bytes."""
    tensors = sorted(_entries(file, raw))
    _check_cover(file, tensors, size)
    return tensors


def _entries(file: str, raw: bytes) -> Iterator[Tensor]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) != len(pairs):
            raise CheckpointBroken(f"{file} has two tensors of one name")
        return found

    try:
        header = json.loads(raw, object_pairs_hook=once)
    except (ValueError, RecursionError):
        raise CheckpointBroken(f"{file} has a header that is not JSON") from None
    if not isinstance(header, dict):
        raise CheckpointBroken(f"{file} has a header that is no object")
    for name, entry in header.items():
        if name != "__metadata__":
            yield _entry(file, name, entry)


def _entry(file: str, name: str, entry: Any) -> Tensor:
    where = f"{file}: tensor {name[:100]}"
    if not isinstance(entry, dict):
        raise CheckpointBroken(f"{where} has a header that is no object")
    dtype, shape, offsets = entry.get("dtype"), _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise CheckpointBroken(f"{where} is of an unknown number format")
    if shape is None or offsets is None or len(offsets) != 2:
        raise CheckpointBroken(f"{where} has no proper shape and place")
    start, end = offsets
    if (end - start) * 8 != prod(shape) * _BITS[dtype]:
        raise CheckpointBroken(f"{where} takes another number of bytes than its shape needs")
    return Tensor(start, end, name, dtype, shape)


def _sizes(values: Any) -> list[int] | None:
    """Return `values` if it is a short list of sizes, else None."""
    is_valid = (
        isinstance(values, list)
        and len(values) <= _MAX_DIMENSIONS
        and all(type(value) is int and 0 <= value < 2**63 for value in values)
    )
    return values if is_valid else None


def _check_cover(file: str, tensors: list[Tensor], size: int) -> None:
    """Check that the tensors cover the file without gap or overlap."""
    first = tensors[0].start if tensors else 0
    if first != 0:
        raise CheckpointBroken(f"{file}: {first} bytes before the first tensor belong to none")
    for one, other in pairwise(tensors):
        if other.start != one.end:
            what = "overlap" if other.start < one.end else "leave a gap"
            raise CheckpointBroken(f"{file}: tensors {one.name[:100]} and {other.name[:100]} {what}")
    end = tensors[-1].end if tensors else 0
    if end > size:
        raise CheckpointBroken(f"{file} is cut short by {end - size} bytes; copy it again")
    if end < size:
        raise CheckpointBroken(f"{file} has {size - end} bytes after its last tensor")
