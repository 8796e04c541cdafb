"""A transformers model with paged attention: computes the logits of packed tokens.

loader.py makes these; compatibility_probe.py checks them.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from lineclear.worker.attention.base import AttentionBackend, Indices, IntArray, LayerSpec
from lineclear.worker.cpu.fused_decoder import FusedDecoder
from lineclear.worker.device.staging import to_device
from lineclear.worker.sampling.logits import Logits, with_argmax

from .attention_layers import attend_by

if TYPE_CHECKING:
    from lineclear.worker.cuda.fused_decoder import CudaFusedDecoder  # imports triton
    from lineclear.worker.recurrent.mixers import RecurrentLayer
    from lineclear.worker.recurrent.states import RecurrentStates

_PAGED = "lineclear"


class ModelRefused(Exception):
    """The model cannot be served correctly; the message says why."""


class ModelFilesChanged(Exception):
    """Files of the model changed during the load, so the memory may mix two models."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    model: Any
    layers: tuple[LayerSpec, ...]
    attention_modules: tuple[nn.Module, ...]
    model_id: str
    family: str
    vocab_size: int
    """Width of the logits."""
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    selects_rows: bool
    """The model supports `logits_to_keep`: it computes logits of selected rows only."""
    weight_bytes: int = 0
    """Bytes of all weights as loaded."""
    weights: str = ""
    """Format of quantized matrices; empty: `dtype`."""
    decoder: FusedDecoder | CudaFusedDecoder | None = None
    """Computes the logits instead of `model`, if set."""
    modules_reason: str = ""
    """Why `model` computes them."""
    probe_logits: Tensor | None = None
    """Logits of the compatibility probe, computed by `model` with paged attention."""
    weights_fingerprint: str = ""
    """Fingerprint of the loaded files (lineclear.model_files.fingerprint); empty for a model from memory."""
    text_fingerprint: str = ""
    directory: Path | None = None
    """Model directory; None for a model from memory."""
    recurrent: tuple[RecurrentLayer, ...] = ()
    """The layers with a recurrent state. A layer of a hybrid may have attention as well, or instead."""

    def make_states(self, num_slots: int, num_snapshots: int, blocks_per_slot: int) -> RecurrentStates | None:
        """Allocate the recurrent states, as many as RecurrentStates says; None for a model without."""
        if not self.recurrent:
            return None
        from lineclear.worker.recurrent.states import RecurrentStates  # other workers do without it

        specs = [layer.mixer.state for layer in self.recurrent]
        return RecurrentStates(specs, num_slots, num_snapshots, blocks_per_slot, self.device)

    @property
    def state_bytes(self) -> int:
        return sum(part.num_bytes for layer in self.recurrent for part in layer.mixer.state)

    def attach(self, backend: AttentionBackend, states: RecurrentStates | None = None) -> None:
        """Use `backend` for attention in every layer, and `states` in those with a recurrent state."""
        for index, module in enumerate(self.attention_modules):
            # A plain attribute, not a parameter.
            module.lineclear_attend = attend_by(module, backend, index)  # type: ignore[assignment]
        for index, layer in enumerate(self.recurrent):
            assert states is not None
            layer.attach(states, index)
        if self.decoder is not None:
            self.decoder.attach(backend)

    def logits(self, tokens: Tensor, read_indices: Indices, positions: Indices, sample_rows: Indices) -> Logits:
        """Return the logits of the packed tokens `sample_rows`, of `tokens[read_indices]`. Call `start_step` first.

        A fused forward pass on a CPU takes arrays only.
        """
        if self.decoder is not None:
            return self.decoder.logits(tokens, read_indices, positions, sample_rows)
        return self._forward(tokens, *map(self._tensor, (read_indices, positions, sample_rows)))

    def forward(self, tokens: Tensor, read_indices: Indices, positions: Indices) -> ModelForward:
        """Run the layers over packed tokens, for logits and hidden states of any rows. Call `start_step` first."""
        if self.decoder is not None:
            self.decoder.forward(tokens, read_indices, positions)
            return ModelForward(self.decoder.head, self.decoder.hidden)
        output = self._layers(tokens, self._tensor(read_indices), self._tensor(positions))

        def hidden(rows: IntArray) -> Tensor:
            states: Tensor = output.last_hidden_state[0]
            return states.index_select(0, to_device(rows, self.device))

        return ModelForward(lambda rows: self._head(output, hidden(rows)), hidden)

    @property
    def _layers_name(self) -> str:
        name: str = self.model.base_model_prefix
        return name if hasattr(self.model, name) else "model"  # Llama 4 has the name of a wrapper

    @torch.inference_mode()
    def _layers(self, tokens: Tensor, read_indices: Tensor, positions: Tensor) -> Any:
        input_ids = tokens.index_select(0, read_indices)
        layers = getattr(self.model, self._layers_name)
        return layers(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)

    @torch.inference_mode()
    def _head(self, output: Any, hidden: Tensor) -> Logits:
        """Return the logits of hidden states: the projection, with scaling or soft cap of the model."""
        name = self._layers_name
        layers, zeros = getattr(self.model, name), torch.zeros(len(hidden), dtype=torch.int64, device=self.device)
        setattr(self.model, name, _ComputedLayers(layers, output, hidden))
        try:
            return with_argmax(forward(self.model, zeros, zeros))
        finally:
            setattr(self.model, name, layers)

    @torch.inference_mode()
    def _forward(self, tokens: Tensor, read_indices: Tensor, positions: Tensor, sample_rows: Tensor) -> Logits:
        input_ids = tokens.index_select(0, read_indices)
        logits = forward(self.model, input_ids, positions, logits_to_keep=sample_rows)
        return with_argmax(logits if self.selects_rows else logits.index_select(0, sample_rows))

    def _tensor(self, indices: Indices) -> Tensor:
        return indices if isinstance(indices, Tensor) else to_device(indices, self.device)


class ModelForward(NamedTuple):
    """The layers of the model over the packed tokens of a step. Its tensors are valid until the next call of either."""

    logits: Callable[[IntArray], Logits]
    """Packed indices -> their logits."""
    hidden: Callable[[IntArray], Tensor]
    """Packed indices -> their hidden states behind the last norm [num_rows, hidden size]."""


class _ComputedLayers(nn.Module):
    """Stands for the layers of a transformers model whose hidden states are computed already."""

    def __init__(self, layers: nn.Module, output: Any, hidden: Tensor) -> None:
        super().__init__()
        self.__dict__["_layers"] = layers  # not as a submodule
        self._output = copy(output)
        self._output.last_hidden_state = hidden[None]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the layers: Falcon H1 keeps a factor of its logits there."""
        return getattr(self.__dict__["_layers"], name)

    def forward(self, *_: Any, **__: Any) -> Any:
        """Return the layers' output with the hidden states."""
        return self._output

    @property
    def decoder(self) -> nn.Module:
        """OPT calls the layers by this name."""
        return self


def forward(model: Any, ids: Tensor, positions: Tensor, **arguments: Any) -> Tensor:
    """Return logits [num_rows, vocabulary] of one packed row of tokens."""
    logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **arguments).logits
    assert isinstance(logits, Tensor)
    return logits[0]


def use_paged_attention(model: Any) -> None:
    """Make every attention layer of the model call its attached backend."""
    use_attention(model, _PAGED, _paged_attention)


def use_attention(model: Any, name: str, function: Callable[..., tuple[Tensor, None]]) -> None:
    """Register `function` with transformers as `name` and make every attention layer call it. Raises ModelRefused."""
    AttentionInterface.register(name, function)
    model.set_attn_implementation(name)
    if model.config.get_text_config()._attn_implementation != name:
        raise ModelRefused(f"{type(model).__name__} has a custom attention that cannot be replaced")


def _paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface: query [1, heads, tokens, dim] to output [1, tokens, heads, dim]."""
    output = module.lineclear_attend(*(x[0].transpose(0, 1) for x in (query, key, value)))  # type: ignore[operator]
    return output[None], None
