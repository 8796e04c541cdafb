"""GGUF files: their tensors under transformers' names, and ggml's blocks as `GroupedWeight`.

Blocks are as in ggml's ggml-quants.c. Formats of 4 bits stay 4 bits; values of 5 and 6 bits lie in bytes, of which
kernels without AVX-512 keep 6 bits. Scales and minima, products of two small numbers in the file, are exact in float32.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lineclear.model_files.gguf_config import architecture_of
from lineclear.model_files.gguf_directory import CONFIG, config_text
from lineclear.model_files.gguf_file import LINK, GgufBroken, GgufHead, GgufTensor, read_head

from .checkpoint import Checkpoint, Make
from .grouped_weight import GroupedWeight, repacked
from .packed_codes import MatrixBroken

_PIECE_BYTES = 1 << 20
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_GEMMA = _NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OF_ARCHITECTURE = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "phi3": {**_NAMES, "ffn_up": "mlp.gate_up_proj"},
    "llama": {**_NAMES, "ffn_gate_inp": "block_sparse_moe.gate"},
}
_EXPERTS = {
    "llama": ("block_sparse_moe", {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}),
    "qwen3moe": ("mlp", {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}),
}
_IGNORED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Numbers of RoPE, which are not weights of a layer."""
_NAME = re.compile(r"(?:blk\.(?P<layer>\d{1,6})\.)?(?P<part>[a-z_]+)\.(?P<kind>weight|bias)")


def open_gguf(directory: Path) -> Checkpoint:
    """Map the GGUF file of a directory that gguf_directory.py made. Raises GgufBroken, and OSError."""
    path = (directory / LINK).resolve()
    head = read_head(path)
    if config_text(path, head) != (directory / CONFIG).read_text("utf-8"):
        raise GgufBroken("has changed since its directory was made; start the server again")
    architecture = architecture_of(head)
    data = torch.from_file(str(path), shared=False, size=head.size, dtype=torch.uint8)
    plain: dict[str, Tensor] = {}
    matrices: dict[str, Make] = {}
    for tensor in head.tensors.values():
        for name, part in _named(tensor, architecture):
            heads = _turned_heads(tensor.name, head, architecture)
            if part.type.name in _PLAIN:
                plain[name] = _plain(data, part, heads, is_offset=architecture.startswith("gemma"))
            else:
                matrices[name] = partial(_matrix, data, part, heads)
    label = f"gguf-{_largest(head)}" if matrices else ""
    return Checkpoint(label, plain, matrices, partial(_scale_frequencies, data, head.tensors.get(_IGNORED[0])))


def _named(tensor: GgufTensor, architecture: str) -> Iterator[tuple[str, GgufTensor]]:
    """Return the name that transformers has for a tensor; one for each expert. Raises GgufBroken."""
    if tensor.name in _IGNORED:
        return
    match = _NAME.fullmatch(tensor.name)
    names = _OF_ARCHITECTURE.get(architecture, _NAMES)
    layer = f"model.layers.{match['layer']}." if match and match["layer"] else ""
    if match and match["part"] in names:
        yield f"{layer}{names[match['part']]}.{match['kind']}", tensor
        return
    module, parts = _EXPERTS.get(architecture, ("", {}))
    expert_part = parts.get(match["part"]) if match else None
    if not match or not expert_part or len(tensor.shape) != 3:
        raise GgufBroken(f"has an unknown tensor of {architecture}, {tensor.name[:100]}; convert the model again")
    count, *shape = tensor.shape
    for expert in range(count):
        start, size = tensor.start + expert * (tensor.size // count), tensor.size // count
        name = f"{layer}{module}.experts.{expert}.{expert_part}.{match['kind']}"
        yield name, GgufTensor(tensor.name, tensor.type, tuple(shape), start, size)


def _turned_heads(name: str, head: GgufHead, architecture: str) -> int:
    """Return the heads in whose rows pairs lie side by side: the converter turns queries and keys of llama. 0: none."""
    if architecture != "llama" or (".attn_q." not in name and ".attn_k." not in name):
        return 0
    heads = head.metadata["llama.attention.head_count"]
    found = heads if ".attn_q." in name else head.metadata.get("llama.attention.head_count_kv", heads)
    return found if isinstance(found, int) else int(found[0])


def _turned_back(rows: Tensor, heads: int) -> Tensor:
    """Return the rows in transformers' order. Raises MatrixBroken."""
    if not heads:
        return rows
    if len(rows) % (2 * heads):
        raise MatrixBroken(f"has {len(rows)} rows, which are not {heads} heads")
    return rows[torch.arange(len(rows)).view(heads, -1, 2).transpose(1, 2).reshape(-1)]


def _plain(data: Tensor, tensor: GgufTensor, heads: int, *, is_offset: bool) -> Tensor:
    stored = data[tensor.start : tensor.start + tensor.size]
    if tensor.start % tensor.type.block_bytes:
        stored = stored.clone()
    values = stored.view(_PLAIN[tensor.type.name]).view(tensor.shape)
    if is_offset and tensor.name.endswith("norm.weight"):
        return values - 1  # the converter adds 1
    try:
        return _turned_back(values, heads)
    except MatrixBroken as error:
        raise GgufBroken(f"has a tensor {tensor.name[:100]} that {error}") from None


def _matrix(data: Tensor, tensor: GgufTensor, heads: int, inputs: int) -> GroupedWeight:
    if len(tensor.shape) != 2 or tensor.shape[1] != inputs:
        raise MatrixBroken(f"has the shape {list(tensor.shape)}, which is no matrix of {inputs} inputs")
    stored = data[tensor.start : tensor.start + tensor.size].view(tensor.shape[0], -1)
    return matrix_of(tensor.type.name, _turned_back(stored, heads))


def matrix_of(kind: str, stored: Tensor) -> GroupedWeight:
    """Return the matrix of blocks uint8 [outputs, bytes of a row], a few rows at a time."""
    read, block_bytes = _BLOCKS[kind]
    bits = 4 if kind.startswith("Q4") else 8
    step = max(1, _PIECE_BYTES // stored.shape[1])
    whole: list[Tensor] = []
    for start in range(0, len(stored), step):
        piece = stored[start : start + step]
        codes, scale, minimum = read(piece.reshape(len(piece), -1, block_bytes))
        codes = repacked(codes.flatten(1), bits) if bits == 4 else codes.flatten(1).to(torch.int8)
        parts = [codes, scale.flatten(1), *([] if minimum is None else [minimum.flatten(1)])]
        whole = whole or [part.new_empty(len(stored), part.shape[1]) for part in parts]
        for target, part in zip(whole, parts, strict=True):
            target[start : start + step] = part
    return GroupedWeight(whole[0], bits, whole[1], whole[2] if len(whole) == 3 else None)


def _largest(head: GgufHead) -> str:
    """Return the format of most numbers, as the file is called after."""
    sizes = Counter[str]()
    for tensor in head.tensors.values():
        sizes[tensor.type.name] += tensor.size
    return max(sizes, key=lambda name: sizes[name]).lower()


def _scale_frequencies(data: Tensor, factors: GgufTensor | None, model: Any) -> None:
    """Divide the frequencies of RoPE by the factors in the file (Llama 3.1). Raises GgufBroken."""
    if factors is None:
        return
    rotary = model.model.rotary_emb
    values = _plain(data, factors, 0, is_offset=False).float()
    frequencies = getattr(rotary, "inv_freq", torch.empty(0))  # Gemma 3 has two kinds, and no factors
    if values.shape != frequencies.shape:
        raise GgufBroken(f"has {list(values.shape)} factors of RoPE for {list(frequencies.shape)} frequencies")
    rotary.inv_freq = frequencies / values
    rotary.original_inv_freq = rotary.inv_freq.clone()


# --- blocks: uint8 [rows, blocks, bytes] to codes, scale and minimum [rows, blocks, ...] -----------------------------

_Read = tuple[Tensor, Tensor, Tensor | None]


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return a float16 of each block as float32, [rows, blocks, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _halves(packed: Tensor) -> Tensor:
    """Return the codes of bytes: first all low halves, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _chunks(part: Tensor, count: int) -> Tensor:
    """Return bytes [..., n] as [..., count, n / count]."""
    return part.reshape(*part.shape[:-1], count, -1)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Return bit 4 of 32 codes, from 4 bytes with the first code in the lowest bit."""
    places = torch.arange(8, dtype=torch.uint8)
    return (blocks[..., at : at + 4, None] >> places & 1).flatten(-2) << 4


def _q4(blocks: Tensor, *, has_minimum: bool) -> _Read:
    scale = _half(blocks, 0)
    return _halves(blocks[..., 4 if has_minimum else 2 :]), scale, -_half(blocks, 2) if has_minimum else scale * 8


def _q5(blocks: Tensor, *, has_minimum: bool) -> _Read:
    at = 4 if has_minimum else 2
    codes = _halves(blocks[..., at + 4 :]) | _fifth_bits(blocks, at)
    if has_minimum:
        return codes, _half(blocks, 0), -_half(blocks, 2)
    return codes.to(torch.int8) - 16, _half(blocks, 0), None


def _q8_0(blocks: Tensor) -> _Read:
    return blocks[..., 2:].view(torch.int8), _half(blocks, 0), None


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and minimum of the 8 groups of a K block: two float16, times 6 bits each in 12 bytes."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scale = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), dim=-1)
    minimum = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), dim=-1)
    return _half(blocks, 0) * scale, _half(blocks, 2) * minimum


def _q4_k(blocks: Tensor) -> _Read:
    return _halves(_chunks(blocks[..., 16:], 4)), *_scales_and_minima(blocks)


def _q5_k(blocks: Tensor) -> _Read:
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = (blocks[..., None, 16:48] >> places & 1) << 4
    codes = _halves(_chunks(blocks[..., 48:], 4)) | fifth.view(*blocks.shape[:-1], 4, 64)
    return codes.flatten(-2), *_scales_and_minima(blocks)


def _q6_k(blocks: Tensor) -> _Read:
    low = _halves(_chunks(blocks[..., :128], 2))  # of each 128 codes
    places = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (_chunks(blocks[..., 128:192], 2)[..., None, :] >> places & 3).flatten(-2) << 4
    codes = (low | high).flatten(-2).to(torch.int8) - 32
    return codes, _half(blocks, 208) * blocks[..., 192:208].view(torch.int8), None


_BLOCKS: dict[str, tuple[Callable[[Tensor], _Read], int]] = {
    "Q4_0": (partial(_q4, has_minimum=False), 18),
    "Q4_1": (partial(_q4, has_minimum=True), 20),
    "Q5_0": (partial(_q5, has_minimum=False), 22),
    "Q5_1": (partial(_q5, has_minimum=True), 24),
    "Q8_0": (_q8_0, 34),
    "Q4_K": (_q4_k, 144),
    "Q5_K": (_q5_k, 176),
    "Q6_K": (_q6_k, 210),
}
