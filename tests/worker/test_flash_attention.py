"""The flash backend calls torch's varlen_attn as torch documents it. The kernels themselves need a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import varlen

from lineclear.wire.messages import BlockCopy
from lineclear.worker.attention import flash
from lineclear.worker.attention.base import LayerSpec
from lineclear.worker.attention.flash import FlashAttention, varlen_attention
from lineclear.worker.attention.reference import ReferenceAttention

from .test_attention import CPU, TOLERANCE, Story

SIGNATURE = inspect.signature(varlen.varlen_attn)
LAYER = LayerSpec(4, 2, 64, 0.125)


def documented(*args: Any, **kwargs: Any) -> Tensor:
    """Compute what the documentation of varlen_attn says of these arguments, one query after the other."""
    given = SIGNATURE.bind(*args, **kwargs).arguments
    query, pages, tables, ends = (
        given["query"],
        (given["key"], given["value"]),
        given["block_table"],
        given["seqused_k"],
    )
    assert {x.dtype for x in (given["cu_seq_q"], tables, ends)} == {torch.int32}
    assert given["enable_gqa"] or query.shape[1] == pages[0].shape[2]
    assert (given["max_q"], given["max_k"]) == (int(given["cu_seq_q"].diff().max()), int(ends.max()))
    left, right = given["window_size"]
    assert right == 0, "causal"
    output = torch.empty_like(query)
    firsts = given["cu_seq_q"].tolist()
    for row, (first, end) in enumerate(pairwise(firsts)):
        keys, values = (pool[tables[row].long()].flatten(0, 1)[: ends[row]] for pool in pages)
        keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], 1).float() for x in (keys, values))
        for place in range(first, end):
            position = int(ends[row]) - end + place
            seen = slice(max(0, position - left) if left >= 0 else 0, position + 1)
            scores = torch.einsum("hd,khd->hk", query[place].float(), keys[seen]) * given["scale"]
            output[place] = torch.einsum("hk,khd->hd", scores.softmax(-1), values[seen])
    return output


@pytest.fixture(name="_documented")
def use_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "varlen_attention", lambda device: documented)


def plain(story: Story) -> Story:
    story.layers = [replace(layer, softcap=0.0, sinks=None, chunk=0, value_dim=0) for layer in story.layers]
    return story


@pytest.mark.usefixtures("_documented")
@pytest.mark.parametrize("seed", range(6))
def test_backend_equals_the_reference(seed: int) -> None:
    dtype = (torch.bfloat16, torch.float16)[seed % 2]
    story = plain(Story(seed, dtype, CPU))
    tested, oracle = story.backend(FlashAttention, 0.0), story.backend(ReferenceAttention, 0.0)
    for batch, num_tokens in story.steps():
        tested.start_step(batch)
        oracle.start_step(batch)
        for index, layer in enumerate(story.layers):
            q, k, v = story.qkv(layer, num_tokens)
            found, wanted = tested.attend(index, q, k, v), oracle.attend(index, q, k, v)
            assert (found.float() - wanted.float()).abs().max() <= TOLERANCE[dtype], (layer, batch.chunks)


@pytest.mark.usefixtures("_documented")
def test_cells_that_nobody_wrote_are_finite() -> None:
    """The kernels may multiply masked values by zero, which leaves a NaN."""
    story = plain(Story(3, torch.bfloat16, CPU))
    backend = story.backend(FlashAttention, float("nan"))
    for batch, num_tokens in story.steps():
        backend.start_step(batch)
        for index, layer in enumerate(story.layers):
            backend.attend(index, *story.qkv(layer, num_tokens))
        for view in backend.block_views:
            assert view[torch.from_numpy(batch.blocks).long()].isfinite().all()
    last = int(batch.blocks[-1])
    for view in backend.block_views:
        view[last].fill_(1.0)
    unused = next(block for block in range(story.num_blocks) if backend.block_views[0][block].isnan().any())
    backend.copy([BlockCopy(last, unused, 1)])
    for view in backend.block_views:
        assert (view[unused][0] == 1).all()
        assert not view[unused][1:].any()


@pytest.mark.parametrize(
    ("layer", "dtype", "reason"),
    [
        (replace(LAYER, softcap=2.0), torch.bfloat16, "no softcap, no sinks"),
        (replace(LAYER, sinks=torch.zeros(4)), torch.bfloat16, "no softcap, no sinks"),
        (replace(LAYER, chunk=4), torch.bfloat16, "no chunks"),
        (replace(LAYER, value_dim=32), torch.bfloat16, "no latents"),
        (LAYER, torch.float32, "computes in bfloat16 or float16"),
    ],
)
def test_layers_without_kernels_are_refused(layer: LayerSpec, dtype: torch.dtype, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        FlashAttention([layer], 4, 16, dtype, CPU)


@pytest.mark.parametrize(
    ("major", "reason"),
    [(8, "no block tables on compute capability 8.x"), (9, "needs the package flash-attn-3"), (10, "flash-attn-4")],
)
def test_devices_without_kernels_are_refused(major: int, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    with pytest.raises(ValueError, match=reason):
        varlen_attention(CPU)


@pytest.mark.parametrize(("major", "name"), [(9, "FA3"), (10, "FA4")])
def test_kernels_of_the_device_are_activated(major: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    activated = list[str]()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(attention, "activate_flash_attention_impl", activated.append)
    assert varlen_attention(CPU) is cast("Callable[..., Any]", varlen.varlen_attn)
    assert activated == [name]
