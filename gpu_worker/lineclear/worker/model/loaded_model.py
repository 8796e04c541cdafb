"""A model on its device whose attention is ours: the logits of packed tokens, and what the worker must know of it.

Whether a model can be served is not decided here: loader.py makes these and probe.py tries them. Nothing here knows
plans or sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from lineclear.worker.attention import AttentionBackend, IntArray, LayerSpec, on_device
from lineclear.worker.cpu.fused_decoder import FusedDecoder
from lineclear.worker.logits import Logits, of

_PAGED = "lineclear"


class ModelRefused(Exception):
    """This model cannot be served correctly; `str()` is a sentence that says why."""


class ModelFilesChanged(Exception):
    """Files of the model changed while it was loaded, so that what is in memory may be of two models."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model on its device, and what the rest of the worker must know of it."""

    model: Any
    layers: tuple[LayerSpec, ...]
    attention_modules: tuple[nn.Module, ...]
    model_id: str
    family: str
    vocab_size: int
    """The width of the logits."""
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    selects_rows: bool
    """The model computes logits only where `logits_to_keep` says."""
    weight_bytes: int = 0
    """Of all weights as they were loaded."""
    weights: str = ""
    """Number format of the matrices; empty: `dtype`."""
    decoder: FusedDecoder | None = None
    """Computes the logits instead of `model`, where there is one."""
    probed: Tensor | None = None
    """The logits of the probe's tokens that `model` itself computed over pages."""
    weights_fingerprint: str = ""
    """Of the files that were loaded (lineclear.model_files.fingerprint); empty where the model came from memory."""
    text_fingerprint: str = ""

    def attach(self, backend: AttentionBackend) -> None:
        """Let every attention layer of the model write to and read from `backend`."""
        for index, module in enumerate(self.attention_modules):
            _attach(module, backend, index)
        if self.decoder is not None:
            self.decoder.attach(backend)

    def logits(self, tokens: Tensor, reads: IntArray, positions: IntArray, rows: IntArray) -> Logits:
        """Of the packed tokens at `rows`. The packed tokens are those of `tokens`, on the device, at `reads`.

        The backend must have begun the step.
        """
        if self.decoder is not None:
            return self.decoder.logits(tokens, reads, positions, rows)
        return self._forward(tokens, reads, positions, rows)

    @torch.inference_mode()
    def _forward(self, tokens: Tensor, reads: IntArray, positions: IntArray, rows: IntArray) -> Logits:
        input_ids, kept = tokens.index_select(0, on_device(reads, self.device)), on_device(rows, self.device)
        logits = forward(self.model, input_ids, on_device(positions, self.device), logits_to_keep=kept)
        return of(logits if self.selects_rows else logits.index_select(0, kept))


def forward(model: Any, ids: Tensor, positions: Tensor, **arguments: Any) -> Tensor:
    """[rows, vocabulary] logits of one packed row of tokens."""
    logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **arguments).logits
    assert isinstance(logits, Tensor)
    return logits[0]


def use_paged_attention(model: Any) -> None:
    """Every attention layer of the model asks the backend that it is attached to."""
    use_attention(model, _PAGED, _paged_attention)


def use_attention(model: Any, name: str, function: Callable[..., tuple[Tensor, None]]) -> None:
    """Every attention layer of the model calls `function`, which transformers knows by `name`. Raises ModelRefused."""
    AttentionInterface.register(name, function)
    model.set_attn_implementation(name)
    if model.config.get_text_config()._attn_implementation != name:
        raise ModelRefused(f"{type(model).__name__} has an attention of its own that cannot be replaced")


def _attach(module: nn.Module, backend: AttentionBackend, index: int) -> None:
    module.lineclear_attention = (backend, index)  # type: ignore[assignment]  # a plain attribute, not a parameter


def _paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, heads, tokens, dim] in, [1, tokens, heads, dim] out."""
    backend, index = module.lineclear_attention  # type: ignore[misc]
    output = backend.attend(index, *(x[0].transpose(0, 1) for x in (query, key, value)))
    return output[None], None
