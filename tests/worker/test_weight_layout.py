"""Which layouts of the weights a loaded model keeps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from support.families import WIDE, tiny_model
from support.kernel_variants import needs_kernels
from torch import Tensor, nn

from lineclear.worker.cpu import linear
from lineclear.worker.device.huge_pages import HugePageArena
from lineclear.worker.kernels import native_library as kernels
from lineclear.worker.model import loader
from lineclear.worker.model.loader import build_fused, wrap_model

AMX = {"amx_bf16"}


class OneDnnLinear(linear.TorchLinear):
    """Stands for oneDNN's product, which processors without AVX-512 do not have for bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(lambda x: F.linear(x, weight, bias))


def products(
    monkeypatch: pytest.MonkeyPatch, *, dtype: torch.dtype, free_weights: float, onednn: bool = True
) -> set[type]:
    """Return the kinds of linear layers on a processor with AMX and `free_weights` times the weights in free memory.

    `onednn` False: oneDNN may not use its instructions, as with ONEDNN_MAX_CPU_ISA=AVX2.
    """
    flags, made = kernels._x86_flags(), set[type]()
    loaded = wrap_model(tiny_model("llama", **WIDE).to(dtype))
    free = int(free_weights * loaded.weight_bytes)
    with monkeypatch.context() as patched:
        patched.setattr(kernels, "_x86_flags", lambda: flags | AMX)
        patched.setattr(kernels, "_prefers_bf16_gemm", lambda chosen: True)
        for name, packer in (("pack", linear.pack), ("pack_twice", linear.pack_twice)):
            patched.setattr(loader, name, noting(packer, made))
        patched.setattr(linear, "onednn", OneDnnLinear)
        for module in (kernels, linear):
            patched.setattr(module, "onednn_packs", lambda _: onednn)
        patched.setattr(loader, "free_bytes", lambda device: free)
        fused = build_fused(loaded)
    assert fused is not None
    assert fused.decoder is not None
    return made


def noting(packer: linear.Packer, made: set[type]) -> linear.Packer:
    def pack(layers: Sequence[nn.Linear], arena: HugePageArena) -> linear.Linear:
        packed = packer(layers, arena)
        made.add(type(packed))
        return packed

    return pack


@needs_kernels
def test_amx_packs_bf16_weights_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert products(monkeypatch, dtype=torch.bfloat16, free_weights=8.1) == {linear.LinearByRows}


@needs_kernels
@pytest.mark.parametrize(("dtype", "free_weights"), [(torch.bfloat16, 7.9), (torch.float32, 1000.0)])
def test_other_weights_are_packed_once(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, free_weights: float
) -> None:
    assert products(monkeypatch, dtype=dtype, free_weights=free_weights) == {OneDnnLinear}


@needs_kernels
def test_amx_without_onednn_uses_the_kernel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert products(monkeypatch, dtype=torch.bfloat16, free_weights=8.1, onednn=False) == {linear.KernelLinear}
