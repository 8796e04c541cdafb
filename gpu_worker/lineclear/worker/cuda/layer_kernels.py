"""The row operations between the matrix products of a layer, in Triton: norms, heads, activation.

Rows are consecutive [num_rows, width]. Arithmetic is in float32 and rounded once at the end; sums of a residual are
rounded before they are normed, as modules do. No kernel reads what it writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lineclear.worker.decoder.decoder_layers import Norm

TILE = 1024
"""Values of a program that need not have a whole row."""
_ELEMENTS_OF_A_WARP = 256
"""16 bytes for each thread in 16-bit formats: one load."""
_MAX_WARPS = 16


@triton.jit
def add_norm_kernel(
    residual, add, rows, sums, normed, add_weight, weight, bias, scale, add_eps, eps,
    WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, HAS_ADD: tl.constexpr, HAS_ROWS: tl.constexpr,
    NORMS_ADD: tl.constexpr, NORMS_SUM: tl.constexpr, CENTERS: tl.constexpr,
):  # fmt: skip
    """Write sums = residual + scale * add, with NORMS_ADD of the normed `add`, and with NORMS_SUM their norm.

    With HAS_ROWS, output row i is made of the row rows[i] of both inputs. With CENTERS, that is a layer norm.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH_PAD)
    exists = columns < WIDTH
    at = row * WIDTH + columns
    source = at
    if HAS_ROWS:
        source = tl.load(rows + row) * WIDTH + columns
    x = tl.load(residual + source, exists, 0.0).to(tl.float32)
    if HAS_ADD:
        y = tl.load(add + source, exists, 0.0).to(tl.float32)
        if NORMS_ADD:
            weights = tl.load(add_weight + columns, exists, 0.0).to(tl.float32)
            y *= tl.rsqrt(tl.sum(y * y, 0) / WIDTH + add_eps) * weights
        rounded = (x + y * scale).to(sums.dtype.element_ty)
        tl.store(sums + at, rounded, exists)
        x = rounded.to(tl.float32)
    if NORMS_SUM:
        weights = tl.load(weight + columns, exists, 0.0).to(tl.float32)
        if CENTERS:
            x = tl.where(exists, x - tl.sum(x, 0) / WIDTH, 0.0)
        x *= tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * weights
        if CENTERS:
            x += tl.load(bias + columns, exists, 0.0)
        tl.store(normed + at, x.to(normed.dtype.element_ty), exists)


@triton.jit
def rotate_kernel(
    qkv, out, positions, rotary, weights, eps,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    ROTATED: tl.constexpr, HAS_NORM: tl.constexpr, WHOLE_ROWS: tl.constexpr, HEADS_PAD: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Norm and rotate some heads of one token, or with WHOLE_ROWS all its queries or all its keys.

    qkv [num_tokens, heads of queries, keys and values, DIM] to out [num_tokens, heads of queries and keys, DIM].
    rotary [num_positions, ROTATED]: cosines of the pairs of the ROTATED leading values of a head, then sines.
    With PAIRS, a pair are neighbours, else a value of the first half and one of the second half.
    """
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, end = tile * HEADS_PAD, QUERY_HEADS + KEY_HEADS
    if WHOLE_ROWS:
        first = tile * QUERY_HEADS
        end = QUERY_HEADS + tile * KEY_HEADS
    heads, dims = first + tl.arange(0, HEADS_PAD)[:, None], tl.arange(0, DIM_PAD)[None, :]
    exists = (heads < end) & (dims < DIM)
    source = qkv + token * (QUERY_HEADS + 2 * KEY_HEADS) * DIM
    x = tl.load(source + heads * DIM + dims, exists, 0.0).to(tl.float32)
    if HAS_NORM:
        if WHOLE_ROWS:
            factor = tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / ((end - first) * DIM) + eps)
        else:
            factor = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        x *= factor * tl.load(weights + heads * DIM + dims, exists, 0.0).to(tl.float32)
    if ROTATED:
        half = ROTATED // 2
        if PAIRS:
            is_first, pair = dims % 2 == 0, dims // 2
            partner = heads * DIM + (dims ^ 1)
        else:
            is_first, pair = dims < half, dims % half
            partner = heads * DIM + tl.where(is_first, dims + half, dims - half)
        rotates = dims < ROTATED
        y = tl.load(source + partner, exists & rotates, 0.0).to(tl.float32)
        if HAS_NORM:
            y *= factor * tl.load(weights + partner, exists & rotates, 0.0).to(tl.float32)
        at = rotary + tl.load(positions + token) * ROTATED + pair
        cosine, sine = tl.load(at, rotates, 1.0).to(tl.float32), tl.load(at + half, rotates, 0.0).to(tl.float32)
        x = x * cosine + tl.where(is_first, -y, y) * sine
    target = out + (token * (QUERY_HEADS + KEY_HEADS) + heads) * DIM + dims
    tl.store(target, x.to(out.dtype.element_ty), exists)


@triton.jit
def activate_kernel(
    source, out, WIDTH: tl.constexpr, TILE: tl.constexpr, ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr
):
    """Write activation(x) of rows of WIDTH values; with IS_GATED activation(gate) * up of rows [gate, up]."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    exists = columns < WIDTH
    source += row * (2 * WIDTH if IS_GATED else WIDTH) + columns
    x = tl.load(source, exists, 0.0).to(tl.float32)
    if ACTIVATION == 0:
        y = x * tl.sigmoid(x)
    elif ACTIVATION == 1:  # (1 + tanh(z / 2)) / 2 is the sigmoid of z
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == 2:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        y = tl.where(x < 0, 0.0, x)
        y = y * y if ACTIVATION == 4 else y
    if IS_GATED:
        y *= tl.load(source + WIDTH, exists, 0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, y.to(out.dtype.element_ty), exists)


def add_norm(
    residual: Tensor, add: Tensor | None, add_norm: Norm | None, norm: Norm | None, scale: float, rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (sum, normed): residual + scale * add, with `add` normed by `add_norm`, and the norm of that by `norm`.

    Without a norm both are the sum. `rows`: the rows to compute; None: all.
    """
    count, width = len(residual) if rows is None else len(rows), residual.shape[1]
    width_pad = triton.next_power_of_2(width)
    sums = residual if add is None else residual.new_empty(count, width)
    normed = sums if norm is None else torch.empty_like(sums)
    weight, add_weight = (residual if x is None else x.weight for x in (norm, add_norm))
    if count and (add is not None or norm is not None):
        add_norm_kernel[(count,)](
            *(residual, residual if add is None else add, residual if rows is None else rows, sums, normed),
            *(add_weight, weight, weight if norm is None or norm.bias is None else norm.bias),
            *(scale, add_norm.eps if add_norm else 0.0, norm.eps if norm else 0.0),
            WIDTH=width,
            WIDTH_PAD=width_pad,
            HAS_ADD=add is not None,
            HAS_ROWS=rows is not None,
            NORMS_ADD=add_norm is not None,
            NORMS_SUM=norm is not None,
            CENTERS=norm is not None and norm.bias is not None,
            num_warps=num_warps(width_pad),
        )
    return sums, normed


def rotate(
    qkv: Tensor,
    num_heads: tuple[int, int],
    positions: Tensor,
    rotary: Tensor | None,
    norm: Norm | None,
    is_whole: bool,
    is_of_pairs: bool = False,
) -> Tensor:
    """Return queries and keys [num_tokens, sum of num_heads, head_dim] of qkv [num_tokens, all heads, head_dim].

    `num_heads`: of queries and of keys. `rotary` None: no rotation. `norm`: weights for all heads, one after the other.
    `is_whole`: its mean is over all heads. `is_of_pairs`: neighbouring values rotate together.
    """
    count, dim, dim_pad = qkv.shape[0], qkv.shape[2], triton.next_power_of_2(qkv.shape[2])
    out = qkv.new_empty(count, sum(num_heads), dim)
    most = triton.next_power_of_2(max(num_heads) if is_whole else sum(num_heads))
    heads_pad = most if is_whole else min(most, max(1, TILE // dim_pad))
    rotate_kernel[(count, 2 if is_whole else triton.cdiv(sum(num_heads), heads_pad))](
        *(qkv, out, positions, qkv if rotary is None else rotary),
        *(qkv if norm is None else norm.weight, 0.0 if norm is None else norm.eps),
        QUERY_HEADS=num_heads[0],
        KEY_HEADS=num_heads[1],
        DIM=dim,
        DIM_PAD=dim_pad,
        ROTATED=0 if rotary is None else rotary.shape[1],
        HAS_NORM=norm is not None,
        WHOLE_ROWS=is_whole,
        HEADS_PAD=heads_pad,
        PAIRS=is_of_pairs,
        num_warps=num_warps(heads_pad * dim_pad),
    )
    return out


def activate(x: Tensor, width: int, activation: int) -> Tensor:
    """Return activation(x) [num_rows, width], or activation(gate) * up of rows [gate, up]; see `ACTIVATIONS`."""
    out = x.new_empty(len(x), width)
    activate_kernel[(len(x), triton.cdiv(width, TILE))](x, out, width, TILE, activation, x.shape[1] != width)
    return out


def num_warps(elements: int) -> int:
    """Return the warps of a program over this number of elements, a power of two."""
    return max(1, min(_MAX_WARPS, elements // _ELEMENTS_OF_A_WARP))
