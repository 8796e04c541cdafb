"""Divides a transformers model among the ranks of a worker (Megatron-LM, Shoeybi et al. 2019).

The first linear layers of attention and of a feed-forward network are divided by output features, in whole heads, and
the last one by input features: its outputs are partial sums, which a hook adds over all ranks. The output layer is
divided by token ids, and its logits are gathered, so that every rank has all of them. Everything else is whole on each
rank: embeddings, norms, routers, and attention whose heads are not independent of each other.

The kinds of layers are known by their names. The logits of the divided model are compared with those of the whole one,
so that a name with another meaning is found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from lineclear.worker.tensor_parallel.ranks import Ranks
from lineclear.worker.tensor_parallel.shard import (
    Pieces,
    Shard,
    add_over_ranks,
    equal_piece,
    gather_over_ranks,
    mark,
    take,
)

from .compatibility_probe import TOLERANCE, eager_logits, relative_error
from .loaded_model import LoadedModel, ModelRefused

log = structlog.get_logger(__name__)

_QUERIES = ({"q_proj", "k_proj", "v_proj"}, {"query_key_value"})
_ATTENTION_OUTPUTS = ("o_proj", "out_proj", "dense")
_NORMS_OF_HEADS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
_FIRST = {"gate_proj": 1, "up_proj": 1, "gate_up_proj": 2, "fc1": 1, "c_fc": 1, "dense_h_to_4h": 1, "w1": 1, "w3": 1}
"""First layers of a feed-forward network, and how many equal parts their outputs have."""
_LAST = ("down_proj", "fc2", "c_proj", "dense_4h_to_h", "w2")
_STATE_PARAMETERS, _CONVOLUTIONS = {"A_log"}, "ShortConv"
"""Of layers with a recurrent state, and the end of the names of such layers: each rank computes all of them."""
_ADVICE = "leave --tensor-parallel-size at 1"
_WHOLE = ("gate", "router", "shared_expert_gate")
"""Routers, whose choice every rank needs."""


def load_divided(ranks: Ranks, read: Callable[[], Any], wrap: Callable[[Any], LoadedModel]) -> LoadedModel:
    """Return this rank's part of what `read()` returns, by `wrap`. Ranks read in turn. Raises ModelRefused."""
    with ranks.in_turn():
        model, expected = read().eval(), None
        if not ranks.rank:
            with torch.inference_mode():
                expected = eager_logits(model)
        divide(model, ranks.rank, ranks.count)
    loaded = wrap(model)
    if expected is not None:
        assert loaded.probe_logits is not None
        error = relative_error(loaded.probe_logits.cpu(), expected)
        if not error <= TOLERANCE[loaded.dtype]:
            raise ModelRefused(
                f"{loaded.family} models cannot be divided: their logits change (relative error {error:.2g}); {_ADVICE}"
            )
    return loaded


@torch.no_grad()
def divide(model: Any, rank: int, count: int) -> None:
    """Leave the part of `rank` in the model, with hooks that combine the parts of `count` ranks.

    The hooks use the default process group of torch.distributed. Raises ModelRefused for a model that cannot be divided
    into `count` parts.
    """
    division = _Division(model.config.get_text_config(), rank, count)
    for name, module in model.named_modules():
        children = {child: x for child, x in module.named_children() if isinstance(x, nn.Linear)}
        own = dict(module.named_parameters(recurse=False))
        if own.keys() & _STATE_PARAMETERS or type(module).__name__.endswith(_CONVOLUTIONS):
            division.known.update(children.values())  # whole on each rank
        elif type(module).__name__.endswith("Attention"):
            division.attention(module, children)
        elif children.keys() & _FIRST.keys():
            division.feed_forward(name, children)
        elif {"gate_up_proj", "down_proj"} <= own.keys():
            division.experts(name, module, own)
    division.head(model.get_output_embeddings())
    division.check_complete(model)


class _Division:
    """The division of one model into `count` parts, of which this is the one of `rank`."""

    def __init__(self, config: Any, rank: int, count: int) -> None:
        self._config, self._rank, self._count = config, rank, count
        self.known = set[nn.Module]()
        self._num_feed_forward = self._num_whole = 0

    def attention(self, module: nn.Module, children: dict[str, nn.Linear]) -> None:
        """Divide an attention layer by heads, or leave it whole on each rank if its heads depend on each other."""
        self.known.update(children.values())
        first = next((names for names in _QUERIES if names <= children.keys()), set[str]())
        last = next((child for child in _ATTENTION_OUTPUTS if child in children), "")
        heads = int(self._config.num_attention_heads)
        kv_heads = int(getattr(self._config, "num_key_value_heads", None) or heads)
        head_dim = int(getattr(module, "head_dim", 0) or self._config.hidden_size // heads)
        norms = [norm for x in _NORMS_OF_HEADS if isinstance(norm := getattr(module, x, None), nn.Module)]
        sizes = {weight.numel() for norm in norms for weight in norm.parameters()}
        if not first or not last or not sizes <= {head_dim}:
            self._num_whole += 1
            return
        for number, kind in ((heads, "attention heads"), (kv_heads, "key-value heads")):
            self._check(number, f"its {number} {kind}")
        for child in first:
            self._outputs(children[child], self._piece(children[child].out_features))
        self._inputs(children[last])
        for attribute in ("num_heads", "num_key_value_heads"):  # some modules reshape by them
            if isinstance(value := getattr(module, attribute, None), int):
                setattr(module, attribute, value // self._count)
        if isinstance(sinks := getattr(module, "sinks", None), nn.Parameter):
            module.sinks = _parameter(take(sinks, 0, self._piece(heads)))

    def feed_forward(self, name: str, children: dict[str, nn.Linear]) -> None:
        """Divide a feed-forward network by the features between its layers."""
        last = [children[child] for child in _LAST if child in children]
        if len(last) != 1:
            raise ModelRefused(f"{name} has no known last layer, so it cannot be divided; {_ADVICE}")
        width = last[0].in_features
        self._check(width, f"the {width} features inside {name}")
        for child in children.keys() & _FIRST.keys():
            self.known.add(children[child])
            self._outputs(children[child], self._piece(children[child].out_features, _FIRST[child]))
        self.known.add(last[0])
        self._inputs(last[0])
        self._num_feed_forward += 1

    def experts(self, name: str, module: nn.Module, own: dict[str, nn.Parameter]) -> None:
        """Divide each expert by the features between its layers."""
        is_interleaved = self._config.model_type == "gpt_oss"  # [inputs, outputs] with gate and up in turn
        is_transposed = is_interleaved or self._config.model_type == "llama4_text"  # [inputs, outputs], gate, then up
        outputs, inputs = (2, 1) if is_transposed else (1, 2)
        width = own["down_proj"].shape[inputs]
        self._check(width, f"the {width} features inside each expert of {name}")
        piece = self._piece(2 * width, 1 if is_interleaved else 2)
        parts = {
            "gate_up_proj": take(own["gate_up_proj"], outputs, piece),
            "down_proj": take(own["down_proj"], inputs, self._piece(width)),
        }
        if "gate_up_proj_bias" in own:
            parts["gate_up_proj_bias"] = take(own["gate_up_proj_bias"], 1, piece)
        if "down_proj_bias" in own and self._rank:
            parts["down_proj_bias"] = torch.zeros_like(own["down_proj_bias"])
        for parameter, part in parts.items():
            setattr(module, parameter, _parameter(part))
        mark(module, Shard(width, own["down_proj"].shape[outputs], inputs=self._piece(width)))
        module.register_forward_hook(_add_over_ranks)
        self._num_feed_forward += 1

    def head(self, module: nn.Module) -> None:
        """Divide the output layer by token ids. The last part is padded if the ids cannot be divided equally."""
        if not isinstance(module, nn.Linear):
            raise ModelRefused(f"its output layer is no linear layer, so it cannot be divided; {_ADVICE}")
        self.known.add(module)
        size = module.out_features
        part = -(-size // self._count)
        start = min(self._rank * part, size)
        self._outputs(module, [(start, min(start + part, size))])
        if padding := part - module.out_features:
            module.weight = _parameter(nn.functional.pad(module.weight, (0, 0, 0, padding)))
            if module.bias is not None:
                module.bias = _parameter(nn.functional.pad(module.bias, (0, padding)))
            module.out_features = part
        module.register_forward_hook(lambda module, inputs, output: gather_over_ranks(output, size))

    def check_complete(self, model: nn.Module) -> None:
        """Raise ModelRefused if a linear layer is of no known kind, or nothing but the output layer was divided."""
        for name, module in model.named_modules():
            is_known = module in self.known or name.rpartition(".")[2] in _WHOLE
            if isinstance(module, nn.Linear) and not is_known:
                raise ModelRefused(f"its linear layer {name} is of no kind that can be divided; {_ADVICE}")
        if not self._num_feed_forward:
            raise ModelRefused(f"{self._config.model_type} models have no layers that can be divided; {_ADVICE}")
        if self._num_whole and not self._rank:
            log.warning("attention_not_divided", layers=self._num_whole, hint="each rank computes and caches all heads")

    def _check(self, size: int, what: str) -> None:
        if size % self._count:
            raise ModelRefused(
                f"--tensor-parallel-size {self._count}: {what} cannot be divided by {self._count}; give a size that"
                " divides them"
            )

    def _piece(self, size: int, groups: int = 1) -> Pieces:
        return equal_piece(size, self._rank, self._count, groups)

    def _outputs(self, module: nn.Linear, pieces: Pieces) -> None:
        """Keep these output features of a layer."""
        mark(module, Shard(module.in_features, module.out_features, outputs=pieces))
        module.weight = _parameter(take(module.weight, 0, pieces))
        if module.bias is not None:
            module.bias = _parameter(take(module.bias, 0, pieces))
        module.out_features = len(module.weight)

    def _inputs(self, module: nn.Linear) -> None:
        """Keep this rank's input features of a layer, and let its outputs be added over all ranks."""
        pieces = self._piece(module.in_features)
        mark(module, Shard(module.in_features, module.out_features, inputs=pieces))
        module.weight = _parameter(take(module.weight, 1, pieces))
        if self._rank:
            module.register_parameter("bias", None)  # added once
        module.in_features = module.weight.shape[1]
        module.register_forward_hook(_add_over_ranks)


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.contiguous(), requires_grad=False)


def _add_over_ranks(module: nn.Module, inputs: object, output: Tensor) -> None:
    add_over_ranks(output)
