"""Fingerprints of a model directory: whether two processes read the same model.

Copies of the same files have the same fingerprint on every machine; paths and times do not count. Small files are
hashed whole. Weights are hashed by header, size and a sample of every tensor, which takes milliseconds. The fingerprint
changes if a model was trained, merged or quantized further. It does not change if a few bits outside the samples
change: it detects another model and does not verify a download.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

from .gguf_file import LINK, MAGIC
from .safetensors_check import INDEX, MAX_HEADER_BYTES, SINGLE

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
"""Files that scheduler and worker must agree on: tokenizer, chat template, end-of-sequence ids, sampling defaults."""
CONFIG_FILE = "config.json"

_HEX_DIGITS = 16
_SAMPLES = 4  # of each tensor
_SAMPLE_BYTES = 64
_QUICK_RANGES = 16
_GGUF_RANGES = 4096
_CHUNK_BYTES = 1 << 20


def text_fingerprint(directory: Path) -> str:
    """Return a digest of the TEXT_FILES. Raises OSError."""
    return combined(f"{name} {_file_digest(directory / name)}" for name in TEXT_FILES)


def weights_fingerprint(directory: Path) -> str:
    """Return a digest of config.json and the safetensors files. Raises OSError."""
    parts = [f"{path.name} {_weights_digest(path)}" for path in weight_files(directory)]
    return combined([f"{CONFIG_FILE} {_file_digest(directory / CONFIG_FILE)}", *parts])


def combined(parts: Iterable[str]) -> str:
    """Return one fingerprint of several texts, in their order."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:_HEX_DIGITS]


def prompt_digest(token_ids: Iterable[int]) -> str:
    """Return a digest of a prompt's token ids."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return hashlib.sha256(packed.tobytes()).hexdigest()[:_HEX_DIGITS]


def stamps(directory: Path) -> tuple[tuple[str, int, int, str], ...]:
    """Return name, size, mtime and a digest of every model file, to detect a change during a load.

    The digest of weights covers the header and a few ranges, so that it is fast before the file is cached. Inode and
    ctime do not count: FUSE and network file systems change them for unchanged files. Follows links. Raises OSError.
    """
    weights = [_stamp(path, _weights_digest(path, max_ranges=_QUICK_RANGES)) for path in weight_files(directory)]
    names = (CONFIG_FILE, INDEX, *TEXT_FILES)
    others = [_stamp(path, _file_digest(path)) for name in names if (path := directory / name).exists()]
    return tuple(sorted((*weights, *others)))


def weight_files(directory: Path) -> list[Path]:
    """Return the weight files that are loaded: the single one, else those of the index; or a GGUF file."""
    if (single := directory / SINGLE).is_file() or (single := directory / LINK).is_file():
        return [single]
    try:
        names = set(json.loads((directory / INDEX).read_bytes())["weight_map"].values())
    except (FileNotFoundError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return []
    return [directory / name for name in sorted(map(str, names)) if (directory / name).is_file()]


def _stamp(path: Path, digest: str) -> tuple[str, int, int, str]:
    found = path.stat()
    return path.name, found.st_size, found.st_mtime_ns, digest


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    except FileNotFoundError:
        return "absent"
    return digest.hexdigest()


def _weights_digest(path: Path, max_ranges: int | None = None) -> str:
    """Return a digest of a weight file's header and of ranges in each tensor, or of a few spread over the file."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(size.to_bytes(8, "little"))
        if os.pread(file.fileno(), len(MAGIC), 0) == MAGIC:
            return _gguf_digest(file.fileno(), size, max_ranges or _GGUF_RANGES)
        header_len = min(int.from_bytes(os.pread(file.fileno(), 8, 0), "little"), MAX_HEADER_BYTES)
        header = os.pread(file.fileno(), header_len, 8)
        digest.update(header)
        tensors = _tensors(header, size - 8 - header_len)
        ranges = [(start, min(_SAMPLE_BYTES, end - start)) for begin, end in tensors for start in _sampled(begin, end)]
        step = 1 if max_ranges is None else max(1, -(-len(ranges) // max_ranges))
        for start, length in ranges[::step]:
            digest.update(os.pread(file.fileno(), length, 8 + header_len + start))
    return digest.hexdigest()


def _gguf_digest(file: int, size: int, num_ranges: int) -> str:
    """Return a digest of the start of a GGUF file and of ranges all over it, without the cost of parsing its head.

    What the head says of the model is in the files that are made of it, which count too.
    """
    digest = hashlib.sha256(size.to_bytes(8, "little") + os.pread(file, _SAMPLE_BYTES * _GGUF_RANGES, 0))
    for number in range(num_ranges):
        start = max(0, size - _SAMPLE_BYTES) * number // max(1, num_ranges - 1)
        digest.update(os.pread(file, _SAMPLE_BYTES, start))
    return digest.hexdigest()


def _tensors(header: bytes, size: int) -> Iterator[tuple[int, int]]:
    """Return the byte ranges of the tensors within the data, or the whole data if the header is unreadable."""
    try:
        entries = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        found = sorted((int(entry["data_offsets"][0]), int(entry["data_offsets"][1])) for entry in entries)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        found = [(0, size)]
    return ((begin, end) for begin, end in found if 0 <= begin < end <= size)


def _sampled(begin: int, end: int) -> list[int]:
    """Return the starts of the sampled ranges of a tensor, evenly spread, including its first and last bytes."""
    last = end - begin - _SAMPLE_BYTES
    if last <= 0:
        return [begin]
    return sorted({begin + last * n // (_SAMPLES - 1) for n in range(_SAMPLES)})
