"""The adapters (LoRA) that a worker holds, and the rows of a step that use them.

A step names an adapter for each row. The fused forward pass on CPUs reads the factors, the one on CUDA calls
`add_product`; transformers' modules get a hook each, which does so for their output. Factors have the model's number
format, sums are in fp32 in the fused pass on CPUs and as in torch's products elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load
from torch import Tensor, nn

from lineclear.model_files.adapter_files import WEIGHTS, AdapterFiles, AdapterFilesRefused, read
from lineclear.worker.device.staging import Put, to_device
from lineclear.worker.quantization.modules import QuantizedLinear
from lineclear.worker.tensor_parallel.shard import shard_of, take

_ANY_RANK = 1 << 20  # the scheduler has the limit


class Factors(NamedTuple):
    """The product that an adapter adds to the output of a module: scale * b @ (a @ x)."""

    a: Tensor
    """[rank, inputs]."""
    b: Tensor
    """[rank, outputs], transposed."""
    scale: float


class AdapterSet:
    """The loaded adapters of one model, by index from 1."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device, *, has_hooks: bool) -> None:
        self.version = 0
        """Changes with the adapters."""
        self.rows: npt.NDArray[np.int32] | None = None
        """[num_tokens]: index of the adapter of each packed row of the step, 0 for none. None: no row has one."""
        self.put: Put = partial(to_device, device=device)
        self._dtype, self._device = dtype, device
        self._modules = _adaptable(model, has_hooks=has_hooks)
        self._has_hooks = has_hooks
        self.has_groups = has_hooks
        """`start_step` brings the rows of each adapter to the device, for `add_product`."""
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._adapters: dict[int, dict[str, Factors]] = {}  # each by module
        self._groups: list[tuple[int, Tensor]] = []

    def __contains__(self, index: object) -> bool:
        return index in self._adapters

    @property
    def max_index(self) -> int:
        return max(self._adapters, default=0)

    def factors(self, index: int, module: str) -> Factors | None:
        """Return the factors that the adapter adds to a module, named by its path in the model."""
        return self._adapters.get(index, {}).get(module)

    def load(self, index: int, key: bytes, directory: Path) -> None:
        """Read an adapter and hold it as `index`. Raises AdapterFilesRefused; an adapter of that index then stays."""
        try:
            data = (directory / WEIGHTS).read_bytes()
            files = read(directory, _ANY_RANK, data)
        except OSError as error:
            raise AdapterFilesRefused(f"its files cannot be read: {error.strerror}") from None
        if files.key != key:
            raise AdapterFilesRefused("its files have changed since it was loaded")
        self._check_shapes(files)
        tensors = load(data)
        self._adapters[index] = {module: self._factors(tensors, module, files.scale) for module in files.shapes}
        self._changed()

    def unload(self, index: int) -> None:
        """Drop an adapter; without one of this index nothing happens."""
        if self._adapters.pop(index, None) is not None:
            self._changed()

    def clear(self) -> None:
        if self._adapters:
            self._adapters.clear()
            self._changed()

    def start_step(self, rows: npt.NDArray[np.int32] | None) -> None:
        """Use these adapters until the next call; see `rows`."""
        self.rows = rows
        if rows is not None and self.has_groups:
            indices = [int(index) for index in np.unique(rows) if index]
            self._groups = [(i, self.put(np.flatnonzero(rows == i))) for i in indices]

    def add_product(self, module: str, x: Tensor, out: Tensor) -> None:
        """Add the products of the step's adapters to the output of a module: x [num_tokens, inputs] to `out`."""
        for index, rows in self._groups:
            if (factors := self.factors(index, module)) is not None:
                product = (x[rows] @ factors.a.t()) @ factors.b * factors.scale
                out.index_add_(0, rows, product)

    def _check_shapes(self, files: AdapterFiles) -> None:
        made_for = f"; it was made for {files.base_model}, which may be another model" if files.base_model else ""
        for module, shape in files.shapes.items():
            if module not in self._modules:
                raise AdapterFilesRefused(f"the model has no linear layer {module[:120]} that can be adapted{made_for}")
            own = shard_of(self._modules[module])[:2]
            if shape != own:
                raise AdapterFilesRefused(
                    f"{module[:120]} maps {shape[0]} to {shape[1]} features in the adapter, and"
                    f" {own[0]} to {own[1]} in the model{made_for}"
                )

    def _factors(self, tensors: Mapping[str, Tensor], module: str, scale: float) -> Factors:
        name = f"base_model.model.{module}.lora_"
        a, b = (tensors[f"{name}{factor}.weight"].to(self._device, self._dtype) for factor in "AB")
        if not (a.isfinite().all() and b.isfinite().all()):
            raise AdapterFilesRefused(f"its factors of {module[:120]} are not finite")
        shard = shard_of(self._modules[module])
        a, b = take(a, 1, shard.inputs), take(b, 0, shard.outputs)
        return Factors(a.contiguous(), b.t().contiguous(), scale)

    def _changed(self) -> None:
        self.version += 1
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._has_hooks:
            names = {name for adapter in self._adapters.values() for name in adapter}
            # First: with tensor parallelism, another hook adds the outputs of all ranks.
            self._hooks = [
                self._modules[name].register_forward_hook(self._hook(name), prepend=True) for name in sorted(names)
            ]

    def _hook(self, name: str) -> Any:
        def add_product(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if self.rows is not None:
                x = inputs[0]  # [1, tokens, features], without the first dimension in shared experts
                self.add_product(name, x.view(-1, x.shape[-1]), output.view(-1, output.shape[-1]))

        return add_product


def _adaptable(model: Any, *, has_hooks: bool) -> dict[str, Any]:
    """Return the linear layers of the decoder layers by path: neither embeddings nor the output layer.

    Nor those that are not called: latent attention absorbs them, or the fused pass computes them with the router.
    """
    uncalled = (".kv_b_proj",) if has_hooks else (".kv_b_proj", ".shared_expert_gate")
    head, kinds = model.get_output_embeddings(), nn.Linear | QuantizedLinear
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, kinds) and module is not head and not name.endswith(uncalled)
    }
