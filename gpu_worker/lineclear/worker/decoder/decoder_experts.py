"""The experts of a decoder layer (decoder_layers.py): gated MLPs, of which a router chooses some for each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lineclear.worker.quantization.grouped_weight import QuantizedWeight
from lineclear.worker.quantization.modules import QuantizedExperts
from lineclear.worker.tensor_parallel.shard import is_divided

_SIGMOID = frozenset({"dots1", "glm4_moe"})
"""Families whose routers score by sigmoid, the others by softmax."""
_INTERLEAVED = frozenset({"gpt_oss"})
"""Families whose experts multiply [inputs, outputs], with outputs of gate and up in turn."""


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """Scores all experts for a row and chooses those with the highest scores."""

    weight: Tensor
    """float32 [experts, hidden size]."""
    bias: Tensor | None
    """float32 [experts], of the logits."""
    correction: Tensor | None
    """float32 [experts], added to the scores for the choice alone."""
    num_chosen: int
    """Experts of a row."""
    is_sigmoid: bool
    """A score is the sigmoid of a logit, else the softmax over all."""
    normalizes: bool
    """A weight is the score divided by the sum over the chosen experts."""
    scale: float
    """Multiplies the weights."""


class ExpertMatrix:
    """A matrix of one expert, as a linear layer. Its weight is a view, or made whenever it is asked for."""

    def __init__(self, stored: Tensor | QuantizedWeight, order: Tensor | None, bias: Tensor | None) -> None:
        """`order`: the stored outputs in the order of those of the layer; None: they are in order."""
        self._stored: Any = stored
        self._order = order
        self.bias = bias if bias is None or order is None else bias[order]
        self.out_features = stored.shape[0]

    @property
    def weight(self) -> Any:
        """[outputs, inputs], a tensor or quantized."""
        if isinstance(self._stored, Tensor):
            return self._stored.contiguous() if self._order is None else self._stored[self._order]
        return self._stored if self._order is None else self._stored.rows(self._order)

    @weight.setter
    def weight(self, weight: Tensor) -> None:
        self._stored, self._order = weight, None


@dataclass(frozen=True, slots=True, eq=False)
class ExpertStack:
    """The matrices of all experts of a layer, one parameter of transformers' module."""

    module: nn.Module
    name: str
    is_transposed: bool
    is_interleaved: bool

    def stored(self, expert: int) -> list[Tensor | QuantizedWeight]:
        """Return the matrices of an expert [outputs, inputs], whose outputs lie one behind the other."""
        stack: Any = getattr(self.module, self.name)
        if isinstance(stack, QuantizedExperts):
            return list(stack.weights[expert])
        return [stack.detach()[expert].t() if self.is_transposed else stack.detach()[expert]]

    def layers(self, expert: int) -> list[Any]:
        """Return the same as `ExpertMatrix`; of an interleaved stack, the outputs of gate before those of up."""
        matrices, biases = self.stored(expert), getattr(self.module, f"{self.name}_bias", None)
        order = torch.arange(matrices[0].shape[0]).view(-1, 2).t().flatten() if self.is_interleaved else None
        bias = None if biases is None else biases.detach()[expert]
        assert len(matrices) == 1 or bias is order is None
        return [ExpertMatrix(matrix, order, bias) for matrix in matrices]

    def free(self) -> None:
        """Take the matrices from the module, which cannot be used afterwards."""
        delattr(self.module, self.name)


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """The experts of a layer. Their outputs are added by the weights of the router."""

    router: Router
    width: int
    """Of what `down` multiplies."""
    gate_up: ExpertStack
    down: ExpertStack
    clamped_swiglu: tuple[float, float] | None
    """Alpha and limit of gpt-oss's activation; None: the activation of the model."""
    is_partial: bool
    """The outputs are sums over the features of this rank only, to be added over all ranks."""
    shared_gate: Router | None
    """With one expert: its weight multiplies the output of shared experts."""

    @property
    def count(self) -> int:
        return len(self.router.weight)


def experts_of(mlp: Any, family: str) -> Experts | None:
    """Return the experts of a layer's MLP module; None if it has none."""
    module: Any = getattr(mlp, "experts", None)
    if module is None:
        return None
    router: Any = mlp.gate if hasattr(mlp, "gate") else mlp.router
    is_interleaved = family in _INTERLEAVED
    down = ExpertStack(module, "down_proj", is_interleaved, is_interleaved=False)
    return Experts(
        router=Router(
            weight=_float(router.weight),
            bias=_float(getattr(router, "bias", None)),
            correction=_float(getattr(getattr(router, "moe_statics", router), "e_score_correction_bias", None)),
            num_chosen=int(router.top_k),
            is_sigmoid=family in _SIGMOID,
            normalizes=bool(getattr(router, "norm_topk_prob", True)),
            scale=float(getattr(router, "routed_scaling_factor", 1.0)),
        ),
        width=down.stored(0)[0].shape[1],
        gate_up=ExpertStack(module, "gate_up_proj", is_interleaved, is_interleaved),
        down=down,
        clamped_swiglu=(float(module.alpha), float(module.limit)) if is_interleaved else None,
        is_partial=is_divided(module),
        shared_gate=_shared_gate(mlp),
    )


def _shared_gate(mlp: Any) -> Router | None:
    gate: Any = getattr(mlp, "shared_expert_gate", None)
    return None if gate is None else Router(_float(gate.weight), None, None, 1, True, False, 1.0)


def _float(tensor: Any) -> Any:
    if isinstance(tensor, QuantizedWeight):
        tensor = tensor.dequantized(torch.float32)
    return None if tensor is None else tensor.detach().float().contiguous()
