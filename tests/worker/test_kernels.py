"""The C++ kernels against torch, every library this processor can run: rows of a decoder layer, and attention."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.attention_pools import fill_pools
from torch import Tensor
from transformers.activations import ACT2FN

from lineclear.worker.attention import cpu_native
from lineclear.worker.attention.base import Chunk, LayerSpec, pack_chunks
from lineclear.worker.attention.reference import ReferenceAttention
from lineclear.worker.decoder.decoder_layers import ACTIVATIONS
from lineclear.worker.kernels.native_library import ELEMENTS, selected_library

pytestmark = pytest.mark.usefixtures("each_library")
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 700])
@pytest.mark.parametrize("centers", [False, True])
def test_add_and_norm(dtype: torch.dtype, rows: int, centers: bool) -> None:
    kernels: Any = selected_library()
    residual, add = (torch.randn(2, rows, 96) + 2).to(dtype)
    (weight, bias), out = torch.randn(2, 96), torch.empty(rows, 96, dtype=dtype)
    total = (residual.float() + add.float() * 0.5).to(dtype)
    kernels.lineclear_add_norm(
        ELEMENTS[dtype], rows, 96, add.data_ptr(), 0.5, residual.data_ptr(), weight.data_ptr(),
        bias.data_ptr() if centers else None, 1e-5, out.data_ptr(),
    )  # fmt: skip
    close(residual, total, dtype)
    wanted = F.layer_norm(total.float(), (96,), weight, bias) if centers else rms_norm(total, weight, 1e-5)
    close(out, wanted, dtype)
    before = residual.clone()
    kernels.lineclear_add_norm(ELEMENTS[dtype], rows, 96, None, 1.0, residual.data_ptr(), None, None, 0.0, None)
    assert torch.equal(residual, before), "without anything to add or to norm, nothing changes"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["none", "head", "row"])
@pytest.mark.parametrize("rotary", [32, 16, 10, 0])
@pytest.mark.parametrize("pairs", [False, True])
def test_split_heads_norms_and_rotates(dtype: torch.dtype, norm: str, rotary: int, pairs: bool) -> None:
    kernels: Any = selected_library()
    rows, heads, kv_heads, dim = 7, 6, 2, 32
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(dtype)
    angles = torch.rand(rows, rotary // 2) * 6
    cosine, sine = angles.cos(), angles.sin()
    widths = {"none": None, "head": (dim, dim), "row": (heads * dim, kv_heads * dim)}[norm]
    weights = None if widths is None else [torch.randn(width) for width in widths]
    q, k, v = (torch.empty(rows, count, dim, dtype=dtype) for count in (heads, kv_heads, kv_heads))
    pointers = [None, None] if weights is None else [w.data_ptr() for w in weights]
    kernels.lineclear_split_heads(
        ELEMENTS[dtype], rows, heads, kv_heads, dim, rotary // 2, pairs, 0,
        qkv.data_ptr(), cosine.data_ptr(), sine.data_ptr(),
        *pointers, norm == "row", 1e-6, q.data_ptr(), k.data_ptr(), v.data_ptr(),
    )  # fmt: skip
    parts = qkv.float().split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    for found, part, weight in zip((q, k), parts[:2], weights or (None, None), strict=True):
        x = part if norm != "row" or weight is None else rms_norm(part, weight, 1e-6)
        x = x.view(rows, -1, dim)
        x = rms_norm(x, weight, 1e-6) if norm == "head" and weight is not None else x
        turned, rest = x[..., :rotary], x[..., rotary:]
        a, b = (turned[..., ::2], turned[..., 1::2]) if pairs else turned.chunk(2, dim=-1)
        both = a * cosine[:, None] - b * sine[:, None], b * cosine[:, None] + a * sine[:, None]
        turned = torch.stack(both, -1).flatten(-2) if pairs else torch.cat(both, -1)
        close(found, torch.cat([turned, rest], dim=-1), dtype)
    assert torch.equal(v, parts[2].view(rows, kv_heads, dim).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_heads_are_split(dtype: torch.dtype) -> None:
    kernels: Any = selected_library()
    qkv = torch.randn(5, 3, 3, 32).to(dtype)
    parts = [torch.empty(5, 3, 32, dtype=dtype) for _ in range(3)]
    kernels.lineclear_split_heads(
        ELEMENTS[dtype], 5, 3, 3, 32, 0, 0, 1, qkv.data_ptr(), *[None] * 4, 0, 0.0, *(x.data_ptr() for x in parts)
    )
    assert torch.equal(torch.stack(parts, 2), qkv)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activation(dtype: torch.dtype, name: str, gated: bool) -> None:
    kernels: Any = selected_library()
    x = (torch.randn(9, 48 + 48 * gated) * 8).to(dtype)
    out = torch.empty(9, 48, dtype=dtype)
    kernels.lineclear_activation(ELEMENTS[dtype], 9, 48, ACTIVATIONS[name], gated, x.data_ptr(), out.data_ptr())
    wanted = ACT2FN[name](x[:, :48].float())
    close(out, wanted * x[:, 48:].float() if gated else wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cap(dtype: torch.dtype) -> None:
    kernels: Any = selected_library()
    x = (torch.randn(3, 53) * 20).to(dtype)
    x[1, 50], x[2, 3], x[2, 52] = float("nan"), float("inf"), -float("inf")
    wanted = torch.tanh(x.float() / 7) * 7
    kernels.lineclear_cap(ELEMENTS[dtype], 3, 53, 7.0, x.data_ptr())
    torch.testing.assert_close(x.float(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=True)


def test_bfloat16_rounding() -> None:
    kernels: Any = selected_library()
    x = torch.cat([torch.randn(4096) * 1e3, torch.tensor([float("nan"), float("inf"), -float("inf")]).repeat(16)])
    x = x[: len(x) // 16 * 16].bfloat16()
    add = (torch.randn(len(x)) * 7).bfloat16()
    wanted = (x.float() + add.float()).bfloat16()
    kernels.lineclear_add_norm(1, 1, len(x), add.data_ptr(), 1.0, x.data_ptr(), None, None, 0.0, None)
    torch.testing.assert_close(x, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 11])
def test_attention_in_every_library(dtype: torch.dtype, group: int) -> None:
    layers = [
        LayerSpec(2 * group, 2, 48, 0.2, window, softcap, sinks=torch.randn(2 * group) if softcap else None)
        for window, softcap in ((0, 0.0), (9, 0.0), (40, 3.0))
    ]
    torch.manual_seed(group)
    cpu, table = torch.device("cpu"), np.random.default_rng(group).permutation(12)
    backends = [kind(layers, 12, 16, dtype, cpu) for kind in (cpu_native.NativeAttention, ReferenceAttention)]
    fill_pools(backends[0], float("nan"))
    for start, end in ((0, 33), (33, 34), (34, 35), (35, 130)):
        batch = pack_chunks([Chunk(0, end - start, start, table[: -(-end // 16)])], 16)
        for backend in backends:
            backend.start_step(batch)
        for index in range(len(layers)):
            heads = (2 * group, 2, 2)
            qkv = [torch.randn(end - start, count, 48).to(dtype) for count in heads]
            close(backends[0].attend(index, *qkv), backends[1].attend(index, *qkv), dtype)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "has_cap"), [(0, False), (40, False), (100, True)])
def test_attention_does_not_depend_on_chunks(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, window: int, has_cap: bool
) -> None:
    """Bit for bit, also in a window: a chunk reads its keys from another position on than a decode."""
    torch.manual_seed(window)
    layer = LayerSpec(6, 2, 48, 0.2, window, 3.0 if has_cap else 0.0, sinks=torch.randn(6) if has_cap else None)
    qkv = [torch.randn(180, count, 48).to(dtype) for count in (6, 2, 2)]

    def attended(ends: list[int]) -> Tensor:
        backend = cpu_native.NativeAttention([layer], 12, 16, dtype, torch.device("cpu"), kv_dtype)
        outputs = []
        for start, end in pairwise([0, *ends]):
            backend.start_step(pack_chunks([Chunk(0, end - start, start, np.arange(-(-end // 16)))], 16))
            outputs.append(backend.attend(0, *(x[start:end].contiguous() for x in qkv)))
        return torch.cat(outputs)

    alone = attended([*range(1, 181)])
    assert torch.equal(attended([180]), alone)
    assert torch.equal(attended([50, 53, 120, 121, 180]), alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_values_stay_in_their_sequence(dtype: torch.dtype) -> None:
    backend = cpu_native.NativeAttention([LayerSpec(2, 1, 16, 1.0)], 4, 16, dtype, torch.device("cpu"))
    backend.start_step(pack_chunks([Chunk(0, 1, 0, np.array([2])), Chunk(1, 5, 0, np.array([1]))], 16))
    q, k, v = torch.randn(6, 2, 16), torch.randn(6, 1, 16), torch.randn(6, 1, 16)
    k[3] = float("nan")  # position 2 of the second sequence
    out = backend.attend(0, q.to(dtype), k.to(dtype), v.to(dtype)).isnan().all(dim=(1, 2)).tolist()
    assert out == [False, False, False, True, True, True]
