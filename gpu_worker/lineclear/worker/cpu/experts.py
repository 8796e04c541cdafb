"""The experts of a layer on a CPU. Rows are sorted by expert, so that each expert multiplies those that chose it.

What the routers choose is written to memory that the later calls read, so the captured calls of a step never change.
A row's sum is in the order of its experts, whatever other rows choose.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from lineclear.worker.decoder.decoder_experts import Experts, ExpertStack, Router
from lineclear.worker.device.huge_pages import HugePageArena
from lineclear.worker.kernels.call_graph import Call, DynamicInt, Kernel, fields, pointer, pointer_to
from lineclear.worker.kernels.native_library import ELEMENTS, selected_library

from .linear import Linear, Packer
from .row_kernels import RowKernels


class ExpertBuffers(NamedTuple):
    """Buffers that the layers of a step share. A place is a row for one of its experts; places are sorted by expert."""

    counts: Tensor
    """int64 [experts + 1]: the places of each expert, then of all."""
    rows: Tensor
    """int64 [places]: the row of each place."""
    places: Tensor
    """int64 [num_tokens, chosen]: the places of each row."""
    weights: Tensor
    """float32 [num_tokens, chosen]: those of the router."""
    states: Tensor
    """[places, hidden size]: the inputs of the experts, later their outputs."""
    gate_up: Tensor
    gated: Tensor

    @classmethod
    def allocate(cls, experts: Experts, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> ExpertBuffers:
        """Return buffers for steps of at most `num_tokens` rows."""
        by_row = num_tokens, experts.router.num_chosen
        counts, places = (torch.empty(shape, dtype=torch.int64) for shape in ((experts.count + 1,), by_row))
        widths = hidden_size, 2 * experts.width, experts.width
        states, gate_up, gated = (torch.empty(places.numel(), width, dtype=dtype) for width in widths)
        return cls(counts, torch.empty_like(places).flatten(), places, torch.empty(by_row), states, gate_up, gated)


class _Router(ctypes.Structure):
    """`LineclearRouter` in kernels/experts.cpp."""

    _fields_ = (
        *fields(ctypes.c_int64, "experts", "inputs", "chosen", "is_sigmoid", "normalizes"),
        *fields(ctypes.c_double, "scale"),
        *fields(ctypes.c_void_p, "weight", "bias", "correction"),
    )

    @classmethod
    def of(cls, router: Router) -> _Router:
        """Return the structure, which points to the tensors of `router`."""
        sizes = *router.weight.shape, router.num_chosen, router.is_sigmoid, router.normalizes
        return cls(*sizes, router.scale, *map(pointer, (router.weight, router.bias, router.correction)))


class PackedExperts:
    def __init__(self, experts: Experts, packer: Packer, arena: HugePageArena, *, has_shared: bool) -> None:
        """`has_shared`: shared experts, or an MLP, write the output first, and these add theirs."""
        self._experts, self._router, self._has_shared = experts, _Router.of(experts.router), has_shared
        self._shared_gate = None if experts.shared_gate is None else _Router.of(experts.shared_gate)
        stacks = experts.gate_up, experts.down
        self._gate_up, self._down = (_packed(stack, experts.count, packer, arena) for stack in stacks)

    def calls(
        self, rows: DynamicInt, x: Tensor, out: Tensor, buffers: ExpertBuffers, kernels: RowKernels, activation: int
    ) -> list[Call]:
        """Return the calls from `rows` rows of x to those of out, both [num_tokens, hidden size]."""
        b, num_places = buffers, DynamicInt.from_address(buffers.counts[-1:].data_ptr())
        sizes = ELEMENTS[x.dtype], b.gated.shape[1], b.places.shape[1], out.shape[1], self._has_shared, 1, 0
        element, width, chosen, hidden_size, adds, one, replaces = map(ctypes.c_int64, sizes)
        gate = kernels.activate(num_places, activation, b.gate_up, b.gated)
        if self._experts.clamped_swiglu is not None:
            limits = map(ctypes.c_float, self._experts.clamped_swiglu)
            gate = _kernel("clamped_swiglu"), (element, num_places, width, *limits, *map(pointer, (b.gate_up, b.gated)))
        routed, weights = tuple(map(pointer, (x, *b[:4]))), (pointer(b.places), pointer(b.weights))
        of_shared = list[Call]()
        if self._shared_gate is not None:  # it uses the buffers first: place i is row i
            of_shared = [
                (_kernel("route"), (pointer_to(self._shared_gate), element, rows, *routed)),
                (_kernel("combine"), (element, rows, one, hidden_size, pointer(out), *weights, replaces, pointer(out))),
            ]
        return [
            *of_shared,
            (_kernel("route"), (pointer_to(self._router), element, rows, *routed)),
            kernels.gather(num_places, pointer(x), pointer(b.rows), b.states),
            type(self._gate_up[0]).bind_experts(self._gate_up, b.counts, b.states, b.gate_up),
            gate,
            type(self._down[0]).bind_experts(self._down, b.counts, b.gated, b.states),
            (_kernel("combine"), (element, rows, chosen, hidden_size, pointer(b.states), *weights, adds, pointer(out))),
        ]


def _kernel(name: str) -> Kernel:
    return Kernel(selected_library(), f"lineclear_{name}")


def _packed(stack: ExpertStack, count: int, packer: Packer, arena: HugePageArena) -> list[Linear]:
    """Pack the matrices of all experts. Frees the stack if the packer frees its inputs."""
    experts = [stack.layers(expert) for expert in range(count)]
    packed = [packer(layers, arena) for layers in experts]
    if isinstance(weight := experts[0][0].weight, Tensor) and not weight.numel():
        stack.free()
    return packed
