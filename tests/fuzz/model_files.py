"""Damaged model files: `python -m fuzz.model_files --count 100000`.

Each is refused with a sentence or read; no other error, and no memory beyond a few times the size of the file. Prints
figures as JSON; exits with 1 at the first failure, with the seed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from support import gguf_files as gguf_support
from support.quantized_checkpoints import FORMATS, Format
from tokenizers import Tokenizer
from torch import Tensor

from lineclear.model_files import model_directory, quantization_check
from lineclear.model_files.gguf_file import GgufBroken, read_head
from lineclear.worker.quantization.checkpoint import METHODS, split
from lineclear.worker.quantization.gguf import open_gguf
from lineclear.worker.quantization.packed_codes import MatrixBroken

_MAX_GROWTH = 64
_DTYPES = (torch.int8, torch.uint8, torch.int32, torch.float16, torch.float32, torch.float8_e4m3fn)
_VALUES: tuple[Any, ...] = (
    None,
    0,
    1,
    -1,
    3,
    8,
    2**63,
    1e400,
    True,
    "",
    "int",
    "pack-quantized",
    [],
    [0, 0],
    [1 << 40, 1],
    {},
)


class Failure(Exception):
    """A damaged file that was neither read nor refused."""


def matrices(form: Format, count: int, seed: int) -> dict[str, int]:
    """Damage the tensors or the `quantization_config` of a matrix `count` times, and read it."""
    dice = random.Random(f"{seed} {form.name}")
    torch.manual_seed(seed)
    shape = (2, 64, 96) if form.name == "mxfp4" else (40, 64)
    parts, _ = form.encode(torch.randn(shape))
    whole = {f"layer{form.separator}{name}": tensor.contiguous() for name, tensor in parts.items()}
    figures = {"refused": 0, "read": 0}
    for number in range(count):
        tensors, config = dict(whole), deepcopy(form.config)
        for _ in range(dice.randint(1, 2)):
            _damage(tensors, config, dice)
        try:
            figures["read" if _read(tensors, config) else "refused"] += 1
        except Exception as error:
            raise Failure(f"seed {seed}, {form.name} {number}: {type(error).__name__}: {error}") from error
    return figures


def _damage(tensors: dict[str, Tensor], config: dict[str, Any], dice: random.Random) -> None:
    name = dice.choice(sorted(tensors) or [""])
    match dice.randrange(7) if tensors else 6:
        case 0:
            del tensors[name]
        case 1:
            tensors[name] = tensors[name].view(torch.uint8) if tensors[name].dim() else tensors[name]
        case 2:
            tensors[name] = tensors[name].float().to(dice.choice(_DTYPES))
        case 3:
            tensors[name] = tensors[name].flatten()[: dice.randint(0, 40)]
        case 4:
            tensors[name] = tensors[name][None] if dice.random() < 0.5 else tensors[name].flatten()
        case 5:
            damaged = tensors[name].clone().contiguous().view(-1).view(torch.uint8)
            if damaged.numel():
                damaged[dice.randrange(damaged.numel())] = dice.randrange(256)
            tensors[name] = damaged.view(tensors[name].dtype).view(tensors[name].shape)
        case _:
            owner: Any = config
            while isinstance(owner, dict) and owner:
                key = dice.choice(sorted(owner))
                if not isinstance(owner[key], dict) or dice.random() < 0.2:
                    owner[key] = dice.choice(_VALUES)
                    break
                owner = owner[key]


def _read(tensors: dict[str, Tensor], config: dict[str, Any]) -> bool:
    """Return whether every matrix was read. Raises AssertionError for one that is larger than it may be."""
    if quantization_check.problem(config):
        return False
    checkpoint = split(tensors, METHODS[config.get("quant_method") or "bitsandbytes"](config))
    size = sum(tensor.nbytes for tensor in tensors.values())
    for make in checkpoint.matrices.values():
        try:
            made = make(64)
        except MatrixBroken:
            return False
        for matrix in made if isinstance(made, list) else [made]:
            assert matrix.num_bytes <= _MAX_GROWTH * size + 4096
            assert tuple(matrix.dequantized().shape) == tuple(matrix.shape)
    return True


def gguf_files(count: int, seed: int, directory: Path) -> dict[str, int]:
    """Damage a GGUF file `count` times: numbers of its head, and bytes anywhere in it; then read all of it."""
    dice, path = random.Random(seed), directory / "damaged.gguf"
    gguf_support.write(path, "llama", gguf_support.Type.Q4_K, num_hidden_layers=1)
    whole = path.read_bytes()
    end = min(tensor.start for tensor in read_head(path).tensors.values())
    figures = {"refused": 0, "read": 0}
    for number in range(count):
        damaged = _damaged_file(whole, end, dice)
        path.write_bytes(damaged)
        tracemalloc.start()
        try:
            figures["read" if _read_gguf(path) else "refused"] += 1
            if (peak := tracemalloc.get_traced_memory()[1]) > _MAX_GROWTH * len(whole):
                raise MemoryError(f"{peak} bytes for a file of {len(damaged)}")
        except Exception as error:
            raise Failure(f"seed {seed}, file {number}: {type(error).__name__}: {error}") from error
        finally:
            tracemalloc.stop()
    return figures


def _damaged_file(whole: bytes, end: int, dice: random.Random) -> bytes:
    data = bytearray(whole)
    for _ in range(dice.choice((1, 1, 2))):
        # Most of the head is vocabulary: half of the damage is at the start and in the descriptions of tensors.
        end = min(end, len(data))
        at = (
            dice.randrange(end)
            if dice.random() < 0.5
            else dice.choice((dice.randrange(900), max(0, end - dice.randrange(800))))
        )
        match dice.choice((0, 0, 0, 1, 1, 2, 2, 3, 4)):
            case 0:
                data[at] = dice.randrange(256)
            case 1:
                data[at : at + 4] = dice.choice((0, 1, 2**31, 2**32 - 1, dice.randrange(64))).to_bytes(4, "little")
            case 2:
                data[at : at + 8] = dice.choice((0, 2**63, 2**64 - 1, len(data), 2**40)).to_bytes(8, "little")
            case 3:
                del data[at : at + dice.randint(1, 40)]
            case _:
                del data[dice.randrange(len(data)) :]
    return bytes(data)


def _read_gguf(path: Path) -> bool:
    try:
        directory = model_directory.locate(str(path))
        model_directory.check(str(path), directory)
        checkpoint = open_gguf(directory)
        for name, make in checkpoint.matrices.items():
            if ".layers.0.self_attn" in name:
                make(gguf_support.SIZES["hidden_size"])
    except (model_directory.NotServable, GgufBroken, MatrixBroken):
        return False
    Tokenizer.from_file(str(directory / "tokenizer.json"))
    shutil.rmtree(directory.parent)
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    figures: dict[str, Any] = {}
    runs: dict[str, Callable[[int], dict[str, int]]] = {
        name: lambda count, form=form: matrices(form, count, options.seed) for name, form in FORMATS.items()
    }
    try:
        for name, run in runs.items():
            figures[name] = run(options.count // 2 // len(runs))
        with tempfile.TemporaryDirectory() as directory:
            os.environ["XDG_CACHE_HOME"] = directory
            figures["gguf"] = gguf_files(options.count // 2, options.seed, Path(directory))
    except Failure as failure:
        print(failure, file=sys.stderr)
        return 1
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
