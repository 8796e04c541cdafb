"""Reads the head of a GGUF file: metadata, and where each tensor lies.

Each length, offset, type and count is checked against the size of the file before memory is taken for it. The format
is in ggml's docs/gguf.md: magic, version, counts, pairs of key and value, descriptions of tensors, a gap, the data.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

MAGIC = b"GGUF"
LINK = "model.gguf"
"""Name of the file in a directory that gguf_directory.py made."""
_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MAX_HEAD_BYTES = 128 << 20
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20
_MAX_NAME_BYTES = 65536


class GgufType(NamedTuple):
    """How numbers of a tensor are stored."""

    name: str
    block: int
    """Numbers of a block."""
    block_bytes: int


TYPES = {
    0: GgufType("F32", 1, 4),
    1: GgufType("F16", 1, 2),
    2: GgufType("Q4_0", 32, 18),
    3: GgufType("Q4_1", 32, 20),
    6: GgufType("Q5_0", 32, 22),
    7: GgufType("Q5_1", 32, 24),
    8: GgufType("Q8_0", 32, 34),
    12: GgufType("Q4_K", 256, 144),
    13: GgufType("Q5_K", 256, 176),
    14: GgufType("Q6_K", 256, 210),
    30: GgufType("BF16", 1, 2),
}
_OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip


class GgufBroken(ValueError):
    """The file is damaged or of a kind that is not read; the message continues the name of the file."""


class GgufTensor(NamedTuple):
    """A tensor; its bytes are [start, start + size) of the file."""

    name: str
    type: GgufType
    shape: tuple[int, ...]
    """As torch orders them: the last one is contiguous."""
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufHead:
    """Metadata and tensors of a file."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    size: int
    """Of the file."""


def read_head(path: Path) -> GgufHead:
    """Read the head of a file. Raises GgufBroken, and OSError if it cannot be read."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        raw = file.read(min(size, 1 << 20))
        while True:
            try:
                return parse_head(raw, size)
            except _MoreNeeded:
                more = file.read(min(len(raw) * 3, _MAX_HEAD_BYTES - len(raw)))
                if not more:
                    raise GgufBroken("is cut short within its header; copy or download it again") from None
                raw += more


class _MoreNeeded(Exception):
    """The header is longer than the bytes that were read."""


def parse_head(raw: bytes, size: int) -> GgufHead:
    """Parse the first bytes of a file of `size` bytes. Raises GgufBroken."""
    cursor = _Cursor(raw, size)
    if cursor.take(4) != MAGIC:
        raise GgufBroken("is no GGUF file")
    version = cursor.number("I")
    if version not in _VERSIONS:
        what = "big-endian" if version & 0xFFFF == 0 else f"of version {version}"
        raise GgufBroken(f"is {what}; versions 2 and 3 with little-endian numbers are read: convert it again")
    num_tensors, num_pairs = cursor.count(24), cursor.count(12)
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string(_MAX_NAME_BYTES)
        if key in metadata:
            raise GgufBroken(f"has the key {key[:100]} twice")
        metadata[key] = cursor.value(cursor.number("I"), key)
    found = [_description(cursor) for _ in range(num_tensors)]
    return GgufHead(metadata, _placed(found, metadata, cursor.at, size), size)


def _description(cursor: _Cursor) -> tuple[str, list[int], int, int]:
    name = cursor.string(_MAX_NAME_BYTES)
    dimensions = cursor.number("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise GgufBroken(f"has a tensor {name[:100]} with {dimensions} dimensions")
    sizes = [cursor.number("Q") for _ in range(dimensions)]
    return name, sizes, cursor.number("I"), cursor.number("Q")


def _placed(
    found: list[tuple[str, list[int], int, int]], metadata: dict[str, Any], end: int, size: int
) -> dict[str, GgufTensor]:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT:
        raise GgufBroken("has an alignment that is no size")
    begin = -(-end // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, sizes, number, offset in found:
        kind = TYPES.get(number)
        if kind is None:
            known = ", ".join(each.name for each in TYPES.values())
            raise GgufBroken(
                f"has the tensor {name[:100]} in the format {_OTHER_TYPES.get(number, number)}; {known} are read."
                " Quantize the model to one of them, as Q4_K_M"
            )
        count = prod(sizes)
        if not all(sizes) or sizes[0] % kind.block or any(one > size * 8 for one in sizes):
            raise GgufBroken(f"has a tensor {name[:100]} of {sizes} numbers in blocks of {kind.block}")
        length = count // kind.block * kind.block_bytes
        if offset > size or begin + offset + length > size:
            raise GgufBroken(f"is cut short: the tensor {name[:100]} ends behind it; copy or download it again")
        if name in tensors or offset % alignment:
            raise GgufBroken(f"has a tensor {name[:100]} that is there twice or not aligned")
        tensors[name] = GgufTensor(name, kind, tuple(reversed(sizes)), begin + offset, length)
    if (total := sum(tensor.size for tensor in tensors.values())) > size:  # one part of a file read many times
        raise GgufBroken(f"has tensors of {total} bytes, more than it has; copy or download it again")
    return tensors


class _Cursor:
    """Reads the header from the start."""

    def __init__(self, raw: bytes, size: int) -> None:
        self._raw, self._size, self.at = raw, size, 0

    def take(self, length: int) -> bytes:
        end = self.at + length
        if end > self._size:
            raise GgufBroken("is cut short within its header; copy or download it again")
        if end > len(self._raw):
            raise _MoreNeeded
        taken = self._raw[self.at : end]
        self.at = end
        return taken

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]

    def count(self, least_bytes: int) -> int:
        """Return the next number: a count of items of at least `least_bytes` bytes each."""
        count: int = self.number("Q")
        if count > (self._size - self.at) // least_bytes:
            raise GgufBroken(f"says that it has {count} entries, more than fit into it; copy or download it again")
        return count

    def string(self, limit: int | None = None) -> str:
        length = self.count(1)
        if limit is not None and length > limit:
            raise GgufBroken(f"has a name of {length} bytes")
        return self.take(length).decode("utf-8", "replace")

    def value(self, kind: int, key: str) -> Any:
        """Return the next value of a type; an array of texts as a list, of numbers as an `array`."""
        if kind == _ARRAY:
            element = self.number("I")
            if element in _NUMBERS or element == _BOOL:
                numbers = array(_NUMBERS.get(element, "b"))
                numbers.frombytes(self.take(self.count(numbers.itemsize) * numbers.itemsize))
                return numbers
            if element == _STRING:
                return self._strings(self.count(8))
            raise GgufBroken(f"has a key {key[:100]} with an array of the unknown type {element}")
        reader: Callable[[], Any] | None = {_STRING: self.string, _BOOL: lambda: self.number("?")}.get(kind)
        if reader is not None:
            return reader()
        if kind not in _NUMBERS:
            raise GgufBroken(f"has a key {key[:100]} of the unknown type {kind}")
        return self.number(_NUMBERS[kind])

    def _strings(self, count: int) -> list[str]:
        """Return the next texts: vocabularies have hundreds of thousands, so without a call for each part."""
        raw, at, end, found = self._raw, self.at, len(self._raw), []
        for _ in range(count):
            if at + 8 > end:
                self.at = at
                self.take(8)
            length = int.from_bytes(raw[at : at + 8], "little")
            at += 8
            if length > end - at:
                self.at = at
                self.take(length)
            found.append(raw[at : at + length].decode("utf-8", "replace"))
            at += length
        self.at = at
        return found
