"""A quantized checkpoint as tensors under the names that they would have without quantization.

Nothing is read here: plain tensors are views of mapped files, and a matrix is made when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from lineclear.model_files.fingerprint import weight_files

from . import compressed_tensors, formats
from .grouped_weight import QuantizedWeight
from .packed_codes import Method

Make = Callable[[int], QuantizedWeight | list[Any]]
"""Number of inputs -> the matrix, or those of all experts."""

METHODS: Mapping[str, Callable[[Mapping[str, Any]], Method]] = {
    "awq": formats.awq,
    "bitsandbytes": formats.bitsandbytes,
    "compressed-tensors": compressed_tensors.method,
    "fbgemm_fp8": formats.float8,
    "fp8": formats.float8,
    "gptq": formats.gptq,
    "mxfp4": formats.mxfp4,
}


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The tensors of a checkpoint by name."""

    weights: str
    """What its format is called."""
    plain: dict[str, Tensor]
    matrices: dict[str, Make]
    """Quantized matrices; the name is that of the parameter which they replace."""
    adjust: Callable[[Any], None] = lambda model: None
    """Changes the loaded model where its configuration cannot say how it differs."""


def open_checkpoint(directory: Path, quantization: Mapping[str, Any]) -> Checkpoint:
    """Map the safetensors files of a directory; `quantization` is a checked `quantization_config`."""
    tensors: dict[str, Tensor] = {}
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            tensors.update((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 (it is no mapping)
    return split(tensors, METHODS[str(quantization.get("quant_method") or "bitsandbytes")](quantization))


def split(tensors: dict[str, Tensor], method: Method) -> Checkpoint:
    """Divide tensors into plain ones and the parts of matrices."""
    plain, modules = dict(tensors), dict[str, None]()
    for marker in method.markers:
        ending = method.joint + marker
        modules.update((name.removesuffix(ending), None) for name in tensors if name.endswith(ending))
    matrices: dict[str, Make] = {}
    for module in modules:
        names = {part: f"{module}{method.joint}{part}" for part in method.parts}
        parts = {part: plain.pop(name) for part, name in names.items() if name in plain}
        matrices[module + method.parameter] = partial(method.read, parts)
    return Checkpoint(method.label, plain, matrices)
