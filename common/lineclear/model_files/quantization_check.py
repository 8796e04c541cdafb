"""Which quantized checkpoints can be loaded, by the `quantization_config` of config.json.

The readers of the matrices are in lineclear.worker.quantization. Sentences are as in `directory_check`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_CURE = (
    "Give the checkpoint that it was made from, or one in GPTQ, AWQ, compressed-tensors (integers or FP8), FP8,"
    " MXFP4 or GGUF; on a CPU, -- --quantization int8 quantizes while loading"
)
_NAMES = {"gptq": "GPTQ", "awq": "AWQ", "fp8": "FP8", "mxfp4": "MXFP4", "hqq": "HQQ", "aqlm": "AQLM"}


def of_config(config: Mapping[str, Any]) -> Any:
    """Return the `quantization_config` of a config.json; None if the model is not quantized."""
    text = config.get("text_config")
    for owner in (config, text if isinstance(text, Mapping) else {}):
        if found := owner.get("quantization_config") or owner.get("compression_config"):
            return found
    return None


def problem(quantization: Any) -> str | None:
    """Return why a checkpoint with this `quantization_config` cannot be loaded, or None."""
    if not isinstance(quantization, Mapping):
        return None if quantization is None else "has a quantization_config that is not a JSON object; copy it again"
    in_bits = next((bits for bits in (4, 8) if quantization.get(f"load_in_{bits}bit")), None)
    method = str(quantization.get("quant_method") or ("bitsandbytes" if in_bits else "an unnamed method"))
    bits = quantization.get("bits") or in_bits
    shown = f"{_NAMES.get(method, method)}, {bits} bits" if bits else _NAMES.get(method, method)
    check = _CHECKS.get(method)
    try:
        reason = "is of a format that lineclear does not read" if check is None else check(quantization)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
        reason = "has a quantization_config that lacks what its method needs"
    return f"is quantized ({shown}) and {reason}. {_CURE}" if reason else None


def _gptq(config: Mapping[str, Any]) -> str | None:
    if config["bits"] not in (4, 8):
        return "has codes that are neither 4 nor 8 bits wide"
    if (form := config.get("checkpoint_format", "gptq")) not in ("gptq", "gptq_v2"):
        return f"has the checkpoint_format {form}, not gptq or gptq_v2"
    int(config.get("group_size", -1))
    return None


def _awq(config: Mapping[str, Any]) -> str | None:
    if (bits := config.get("bits", config.get("w_bit"))) != 4:
        return f"has codes of {bits} bits, not 4"
    if (version := str(config.get("version", "gemm")).lower()) not in ("gemm", "gemv"):
        return f"is of the version {version}, not gemm or gemv"
    int(config.get("group_size", config.get("q_group_size", 128)))
    return None


def _compressed_tensors(config: Mapping[str, Any]) -> str | None:
    if config.get("sparsity_config", {}).get("format", "dense") != "dense":
        return "is sparse, too"
    if (config.get("transform_config") or {}).get("config_groups"):
        return "needs a transformation of activations (transform_config)"
    if not config["config_groups"]:
        return "has no config_groups"
    blocks = set()
    for group in config["config_groups"].values():
        weights = group["weights"]
        kind, bits = weights.get("type", "int"), weights["num_bits"]
        form = group.get("format") or config.get("format")
        if (form, kind, bits) not in _COMPRESSED:
            return f"is of the format {form} with weights of {bits} bits ({kind})"
        if weights.get("strategy") == "block":
            blocks.add(_sizes(weights["block_structure"]))
    return "has blocks of several sizes" if len(blocks) > 1 else None


def _sizes(block: Any) -> tuple[int, int]:
    """Return the rows and columns of a block. Raises ValueError."""
    rows, columns = block
    if not (type(rows) is int and type(columns) is int and rows > 0 and columns > 0):
        raise ValueError("a size is no positive integer")
    return rows, columns


_COMPRESSED = {
    ("pack-quantized", "int", 4),
    ("pack-quantized", "int", 8),
    ("int-quantized", "int", 8),
    ("naive-quantized", "int", 8),
    ("float-quantized", "float", 8),
    ("naive-quantized", "float", 8),
}


def _fp8(config: Mapping[str, Any]) -> str | None:
    if (block := config.get("weight_block_size")) is not None:
        _sizes(block)
    return None


def _bitsandbytes(config: Mapping[str, Any]) -> str | None:
    return None if config.get("load_in_8bit") else "holds 4 bits in a table of fractions, which is not supported"


_CHECKS: Mapping[str, Callable[[Mapping[str, Any]], str | None]] = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": _fp8,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": lambda config: None,
}
