"""Experts on a CPU: the router, the rows of each expert and their sum, in every library that this processor can run."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.families import WIDE, tiny_model
from support.kernel_variants import modules_reason, needs_kernels
from torch import Tensor, nn

from lineclear.worker.cpu.experts import ExpertBuffers, PackedExperts
from lineclear.worker.cpu.linear import Packer, leave_unpacked, pack, pack_twice
from lineclear.worker.cpu.quantized_linear import pack_int8
from lineclear.worker.cpu.row_kernels import RowKernels
from lineclear.worker.decoder.decoder_experts import Experts, experts_of
from lineclear.worker.device.huge_pages import HugePageArena
from lineclear.worker.kernels.call_graph import CallGraph, DynamicInt
from lineclear.worker.kernels.native_library import ELEMENTS, selected_library
from lineclear.worker.model import loader
from lineclear.worker.model.loader import build_fused, wrap_model

pytestmark = needs_kernels
HIDDEN, WIDTH, COUNT, CHOSEN = 48, 32, 7, 3


class Router(nn.Module):
    """As those of transformers."""

    def __init__(self, *, has_correction: bool, normalizes: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(COUNT, HIDDEN)), nn.Parameter(torch.randn(COUNT))
        self.top_k, self.norm_topk_prob, self.routed_scaling_factor = CHOSEN, normalizes, 1.5
        if has_correction:
            self.e_score_correction_bias = nn.Parameter(torch.rand(COUNT))


def mlp_of(*, has_correction: bool = False, normalizes: bool = True) -> Any:
    torch.manual_seed(3)
    experts = nn.Module()
    experts.gate_up_proj = nn.Parameter(torch.randn(COUNT, 2 * WIDTH, HIDDEN) / 8)
    experts.down_proj = nn.Parameter(torch.randn(COUNT, HIDDEN, WIDTH) / 8)
    return SimpleNamespace(gate=Router(has_correction=has_correction, normalizes=normalizes), experts=experts)


def described(mlp: Any, family: str = "mixtral") -> Experts:
    found = experts_of(mlp, family)
    assert found is not None
    return found


def computed(experts: Experts, x: Tensor, packer: Packer = pack, *, shared: Tensor | None = None) -> Tensor:
    """Return the outputs of the experts for the rows of `x`."""
    packed = PackedExperts(experts, packer, HugePageArena(), has_shared=shared is not None)
    buffers = ExpertBuffers.allocate(experts, len(x) + 2, HIDDEN, x.dtype)
    out = x.new_full((len(x), HIDDEN), float("nan")) if shared is None else shared.clone()
    model: Any = SimpleNamespace(dtype=x.dtype, residual_scale=1.0, rotates_pairs=False, has_grouped_heads=False)
    calls = packed.calls(DynamicInt(len(x)), x.contiguous(), out, buffers, RowKernels(model), 0)
    CallGraph(calls).replay()
    assert buffers.counts[:-1].sum() == buffers.counts[-1] == len(x) * CHOSEN
    return out


def expected(mlp: Any, x: Tensor, *, is_sigmoid: bool = False) -> Tensor:
    """As transformers computes them, in float64."""
    router, x = mlp.gate, x.double()
    logits = x @ router.weight.double().T + router.bias.double()
    scores = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
    correction = getattr(router, "e_score_correction_bias", torch.zeros(COUNT))
    chosen = (scores + correction.double()).topk(CHOSEN, dim=-1).indices
    weights = scores.gather(1, chosen)
    if router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for row, (experts, of_row) in enumerate(zip(chosen.tolist(), weights * router.routed_scaling_factor, strict=True)):
        for expert, weight in zip(experts, of_row, strict=True):
            gate, up = (mlp.experts.gate_up_proj[expert].double() @ x[row]).chunk(2)
            out[row] += weight * (mlp.experts.down_proj[expert].double() @ (nn.functional.silu(gate) * up))
    return out


@pytest.mark.usefixtures("each_library")
@pytest.mark.parametrize("family", ["mixtral", "glm4_moe"])
@pytest.mark.parametrize("has_correction", [True, False])
@pytest.mark.parametrize("normalizes", [True, False])
def test_outputs_equal_those_of_each_row(family: str, has_correction: bool, normalizes: bool) -> None:
    mlp = mlp_of(has_correction=has_correction, normalizes=normalizes)
    x, shared = torch.randn(33, HIDDEN), torch.randn(33, HIDDEN)
    wanted = expected(mlp, x, is_sigmoid=family == "glm4_moe")
    torch.testing.assert_close(computed(described(mlp, family), x).double(), wanted, rtol=1e-4, atol=1e-5)
    found = computed(described(mlp, family), x, shared=shared)
    torch.testing.assert_close(found.double(), wanted + shared, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("each_library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_of_shared_experts(dtype: torch.dtype) -> None:
    """Qwen2-MoE's: the output of shared experts is multiplied by a number of each row. Rows are independent."""
    mlp, x, shared = mlp_of(), torch.randn(33, HIDDEN).to(dtype), torch.randn(33, HIDDEN).to(dtype)
    mlp.experts.to(dtype)
    mlp.shared_expert_gate = nn.Linear(HIDDEN, 1, bias=False)
    wanted = expected(mlp, x) + mlp.shared_expert_gate(x.float()).sigmoid() * shared
    found = computed(described(mlp), x, shared=shared)
    assert (found.double() - wanted).norm() < (1e-5 if dtype is torch.float32 else 0.02) * wanted.norm()
    alone = [computed(described(mlp), row[None], shared=part[None]) for row, part in zip(x, shared, strict=True)]
    assert torch.equal(torch.cat(alone), found)


@pytest.mark.usefixtures("each_library")
@pytest.mark.parametrize("packer", [pack, pack_twice, pack_int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_independent(packer: Packer, dtype: torch.dtype) -> None:
    """Bit for bit, whatever others choose, and whatever numbers they have."""
    mlp = mlp_of()
    mlp.experts.to(dtype)
    experts, x = described(mlp), torch.randn(40, HIDDEN).to(dtype)
    alone = torch.cat([computed(experts, row[None], packer) for row in x])
    assert (alone.double() - expected(mlp, x)).norm() < 0.03 * expected(mlp, x).norm()
    assert torch.equal(computed(experts, x, packer), alone)
    x[5] = float("nan")
    found = computed(experts, x, packer)
    assert torch.equal(found[:5], alone[:5])
    assert torch.equal(found[6:], alone[6:])


def test_experts_that_no_row_chose_are_not_computed() -> None:
    mlp = mlp_of()
    with torch.no_grad():
        mlp.gate.bias[[0, 4]] = -1e9
        mlp.experts.gate_up_proj[[0, 4]] = float("nan")
    for packer in (pack, leave_unpacked):
        assert computed(described(mlp), torch.randn(20, HIDDEN), packer).isfinite().all()


def test_equal_scores_choose_the_first_experts() -> None:
    mlp = mlp_of()
    with torch.no_grad():
        mlp.gate.weight.zero_()
        mlp.gate.bias.copy_(torch.tensor([0.0, 2, 1, 1, 1, 1, 0]))
        mlp.experts.gate_up_proj[4:] = float("nan")
    assert computed(described(mlp), torch.randn(3, HIDDEN)).isfinite().all()


@pytest.mark.usefixtures("each_library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clamped_swiglu(dtype: torch.dtype) -> None:
    kernels: Any = selected_library()
    gate_up = torch.randn(9, 2 * 48) * 8
    gate_up[3, 5] = gate_up[4, 60] = float("nan")
    gate_up, out = gate_up.to(dtype), torch.empty(9, 48, dtype=dtype)
    arguments = ctypes.c_float(1.702), ctypes.c_float(7.0), gate_up.data_ptr(), out.data_ptr()
    kernels.lineclear_clamped_swiglu(ELEMENTS[dtype], 9, 48, *arguments)
    gate, up = gate_up.float().chunk(2, dim=1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    wanted = gate * torch.sigmoid(gate * 1.702) * (up + 1)
    torch.testing.assert_close(out.float(), wanted, rtol=1e-2, atol=1e-2, equal_nan=True)


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_packing_frees_the_experts(family: str) -> None:
    model = tiny_model(family, **WIDE)
    assert build_fused(wrap_model(model)) is not None
    names = {name.rpartition(".")[2] for name, _ in model.named_parameters() if ".experts." in name}
    assert names == ({"gate_up_proj_bias", "down_proj_bias"} if family == "gpt_oss" else set())


@pytest.mark.parametrize(
    ("family", "changes"), [("olmoe", {"clip_qkv": 1.0}), ("glm4_moe", {"n_group": 2, "topk_group": 1})]
)
def test_what_the_kernels_lack_runs_the_modules(family: str, changes: dict[str, Any]) -> None:
    loaded = wrap_model(tiny_model(family, **WIDE | changes))
    assert modules_reason(build_fused(loaded)) == f"no fused pass is written for this variant of {family}"


def test_experts_on_a_gpu_run_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "log", log := Mock())
    loaded = wrap_model(tiny_model("mixtral"))
    assert modules_reason(loader.build_cuda(loaded)) == "experts are fused on CPUs only"
    assert log.warning.call_args.kwargs == {"family": "mixtral", "problem": "experts are fused on CPUs only"}
