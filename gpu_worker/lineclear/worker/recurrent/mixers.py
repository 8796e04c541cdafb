"""The layers of transformers that have a packed forward pass with a state, by the name of their class.

To add one: a class with `state` and `__call__` beside these and its entry in `MIXERS`. The compatibility probe
compares it with the layer's own forward pass, and tests/worker/test_recurrent.py runs over every entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from .convolution import ShortConvolution
from .gated_delta import GatedDelta
from .mamba import Mamba1, Mamba2
from .states import RecurrentStates, Rows, StateSpec


class Mixer(Protocol):
    """The packed forward pass of one layer."""

    @property
    def state(self) -> tuple[StateSpec, ...]:
        """Return the parts of its state."""

    def __call__(self, x: Tensor, rows: Rows, pools: Sequence[Tensor]) -> Tensor:
        """Compute packed tokens [num_tokens, hidden size], and leave the states behind the rows in `pools`."""


MIXERS: dict[str, Callable[[Any], Mixer]] = {
    "BambaMixer": Mamba2,
    "FalconH1Mixer": Mamba2,
    "FalconMambaMixer": Mamba1,
    "GraniteMoeHybridMambaLayer": Mamba2,
    "JambaMambaMixer": Mamba1,
    "Lfm2MoeShortConv": ShortConvolution,
    "Lfm2ShortConv": ShortConvolution,
    "Mamba2Mixer": Mamba2,
    "MambaMixer": Mamba1,
    "NemotronHMamba2Mixer": Mamba2,
    "OlmoHybridGatedDeltaNet": GatedDelta,
    "Qwen3NextGatedDeltaNet": GatedDelta,
    "Qwen3_5GatedDeltaNet": GatedDelta,
    "Qwen3_5MoeGatedDeltaNet": GatedDelta,
}


class RecurrentLayer(NamedTuple):
    """A layer of the model, and its packed forward pass."""

    module: nn.Module
    mixer: Mixer

    def attach(self, states: RecurrentStates, index: int) -> None:
        """Compute packed tokens from here on, with the states of layer `index`."""
        self.module.forward = partial(_forward, self.mixer, states, states.pools[index])


def recurrent_layers(model: nn.Module) -> tuple[RecurrentLayer, ...]:
    """Return the layers of the model that are in `MIXERS`, in order. They compute by their own forward pass again."""
    modules = [module for module in model.modules() if type(module).__name__ in MIXERS]
    for module in modules:
        module.__dict__.pop("forward", None)
    return tuple(RecurrentLayer(module, MIXERS[type(module).__name__](module)) for module in modules)


def _forward(
    mixer: Mixer, states: RecurrentStates, pools: Sequence[Tensor], hidden_states: Tensor, *_: Any, **__: Any
) -> Tensor:
    """Stand for the module's own forward. Hidden states are [1, num_tokens, hidden size]."""
    return mixer(hidden_states[0], states.rows, pools)[None]
