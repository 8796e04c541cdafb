"""Makes a transformers model whose matrices stay quantized: its modules from the configuration, without memory, then
each quantized matrix in place of the parameter that it stands for, then the plain tensors by transformers' own loader.

Names go through transformers' renaming and merging for the type of the model, as those of a plain checkpoint.
Several matrices are made at a time, each on one thread: one with all threads would wait at each of its many small
operations, ten times as long on a busy machine.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from lineclear.worker.cpu.thread_tuner import openmp_setter
from lineclear.worker.quantization.checkpoint import Checkpoint, Make
from lineclear.worker.quantization.grouped_weight import QuantizedWeight
from lineclear.worker.quantization.modules import QuantizedEmbedding, QuantizedExperts, QuantizedLinear
from lineclear.worker.quantization.packed_codes import MatrixBroken

from .loaded_model import ModelRefused
from .text_backbone import auto_class

_TRANSPOSED_EXPERTS = frozenset({"gpt_oss"})
"""Model types whose experts multiply [inputs, outputs]."""


def quantized_model(
    config: Any, checkpoint: Checkpoint, dtype: str | torch.dtype, device: torch.device
) -> tuple[Any, dict[str, Any]]:
    """Return a model with eager attention, and transformers' report of missing weights. Raises ModelRefused."""
    kind: Any = auto_class(config)._model_mapping[type(config)]

    def build(self: Any, *arguments: Any, **others: Any) -> None:
        kind.__init__(self, *arguments, **others)
        with torch.device("cpu"):  # modules are made on the meta device
            _Filling(self).place(checkpoint)

    for part in (config, config.get_text_config()):  # or transformers looks for packages that read it
        vars(part).pop("quantization_config", None)
    # Of the same name in the same module, because transformers looks for conversions by both.
    skeleton: Any = type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})
    model, report = skeleton.from_pretrained(
        None,
        config=config,
        state_dict=checkpoint.plain,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    model.__class__ = kind
    checkpoint.adjust(model)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_shared = head.weight is embeddings.weight
    model.to(device)
    if is_shared:
        head.weight = embeddings.weight
    return model, report


class _Filling:
    """Puts quantized matrices into a model without memory."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping  # missing in some releases
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self._model, self._parameters = model, dict(model.state_dict())
        transforms = get_model_conversion_mapping(model)
        self._renamings = [x for x in transforms if isinstance(x, WeightRenaming)]
        self._converters = [x for x in transforms if isinstance(x, WeightConverter)]

    def place(self, checkpoint: Checkpoint) -> None:
        """Replace each parameter that `checkpoint` has as a quantized matrix. Raises ModelRefused."""
        from transformers.core_model_loading import dot_natural_key, rename_source_key

        direct: list[tuple[str, str, int]] = []
        merged: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        prefix = self._model.base_model_prefix
        for name in sorted(checkpoint.matrices, key=dot_natural_key):
            target, pattern = rename_source_key(name, self._renamings, self._converters, prefix, self._parameters)
            if target not in self._parameters:
                continue  # of a part that is not used, as layers that predict further tokens
            if pattern is None:
                direct.append((target, name, self._num_inputs(target, name)))
            else:
                merged[target][pattern].append(name)
        made = _made_in_order((name, checkpoint.matrices[name], inputs) for _, name, inputs in direct)
        for (target, name, _), matrices in zip(direct, made, strict=True):
            self._replace(target, name, matrices)
        for target, sources in merged.items():
            self._merge(target, self._ordered(target, sources), checkpoint)
        self._share_tied_weights(checkpoint)

    def _num_inputs(self, target: str, name: str) -> int:
        """Return the inputs of the matrix in place of a parameter. Raises ModelRefused."""
        owner, _, attribute = target.rpartition(".")
        module, parameter = self._model.get_submodule(owner), self._parameters[target]
        if parameter.dim() == 3:
            return int(parameter.shape[1 if self._has_transposed_experts() else 2])
        if parameter.dim() != 2 or attribute != "weight" or not isinstance(module, nn.Linear | nn.Embedding):
            raise ModelRefused(
                f"{name} is quantized, and {type(module).__name__} cannot compute with a quantized {attribute}; give a"
                " checkpoint where it is not"
            )
        return int(parameter.shape[1])

    def _has_transposed_experts(self) -> bool:
        return self._model.config.model_type in _TRANSPOSED_EXPERTS

    def _replace(self, target: str, name: str, matrices: list[QuantizedWeight]) -> None:
        owner = target.rpartition(".")[0]
        module, parameter = self._model.get_submodule(owner), self._parameters[target]
        if parameter.dim() == 3:
            experts = [[matrix] for matrix in matrices]
            is_transposed = self._has_transposed_experts()
            self._set_experts(target, QuantizedExperts(experts, parameter.dtype, is_transposed=is_transposed))
            return
        (weight,) = matrices
        if tuple(weight.shape) != tuple(parameter.shape):
            raise ModelRefused(
                f"{name} is a matrix of {list(weight.shape)}, and the model's is {list(parameter.shape)}"
            )
        if isinstance(module, nn.Linear):
            self._model.set_submodule(owner, QuantizedLinear(weight, module.bias))
        else:
            factor = float(getattr(module, "scalar_embed_scale", 1.0))
            self._model.set_submodule(owner, QuantizedEmbedding(weight, parameter.dtype, factor))

    def _ordered(self, target: str, sources: dict[str, list[str]]) -> list[list[str]]:
        """Return the names of each expert's matrices, in the order of their outputs. Raises ModelRefused."""
        from transformers.core_model_loading import Concatenate, MergeModulelist

        first = next(iter(sources))
        converter = next(x for x in self._converters if first in x.source_patterns)
        steps = [(type(step), step.dim) for step in converter.operations if hasattr(step, "dim")]
        lists = [sources.get(pattern, []) for pattern in converter.source_patterns]
        is_known = steps in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
        if not is_known or len(steps) != len(converter.operations) or len(set(map(len, lists))) != 1:
            raise ModelRefused(
                f"{target} is made of quantized matrices in a way that is not supported, as {lists[0][0]}"
            )
        return [list(names) for names in zip(*lists, strict=True)]

    def _merge(self, target: str, names: Sequence[Sequence[str]], checkpoint: Checkpoint) -> None:
        """Put the matrices of all experts in place of one parameter."""
        parameter = self._parameters[target]
        count, outputs, inputs = parameter.shape
        made = _made_in_order((name, checkpoint.matrices[name], inputs) for expert in names for name in expert)
        experts = [[next(made)[0] for _ in expert] for expert in names]
        if len(experts) != count or any(sum(part.shape[0] for part in expert) != outputs for expert in experts):
            raise ModelRefused(
                f"{target} has {len(experts)} quantized experts that do not fit into {list(parameter.shape)}"
            )
        self._set_experts(target, QuantizedExperts(experts, parameter.dtype))

    def _set_experts(self, target: str, experts: QuantizedExperts) -> None:
        shapes = {(len(experts.weights), sum(part.shape[0] for part in parts)) for parts in experts.weights}
        outputs = self._parameters[target].shape[2 if experts.is_transposed else 1]
        if shapes != {(self._parameters[target].shape[0], outputs)}:
            raise ModelRefused(f"{target} has experts that do not fit into {list(self._parameters[target].shape)}")
        owner, _, attribute = target.rpartition(".")
        module = self._model.get_submodule(owner)
        delattr(module, attribute)
        setattr(module, attribute, experts)

    def _share_tied_weights(self, checkpoint: Checkpoint) -> None:
        """Let a tied output layer use the quantized embeddings, and keep transformers from tying replaced modules."""
        embeddings, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        tied = self._model.all_tied_weights_keys
        name = next(name for name, module in self._model.named_modules() if module is head)
        is_tied = f"{name}.weight" in tied and f"{name}.weight" not in checkpoint.plain
        if is_tied and isinstance(embeddings, QuantizedEmbedding) and isinstance(head, nn.Linear):
            self._model.set_submodule(name, QuantizedLinear(embeddings.weight, head.bias))
        left = self._model.state_dict()
        self._model.all_tied_weights_keys = {
            name: source for name, source in tied.items() if name in left and source in left
        }


def _made_in_order(jobs: Iterable[tuple[str, Make, int]]) -> Iterator[list[QuantizedWeight]]:
    """Yield the matrices of each name, made with this number of inputs, some ahead. Raises ModelRefused."""
    num_threads, made = torch.get_num_threads(), deque[Future[list[QuantizedWeight]]]()
    with ThreadPoolExecutor(num_threads, "matrices", initializer=_use_one_thread) as pool:
        for job in jobs:
            made.append(pool.submit(_made, *job))
            if len(made) > num_threads:
                yield made.popleft().result()
        while made:
            yield made.popleft().result()


def _use_one_thread() -> None:
    """Let the operations of this thread use no other ones. The number of the process stays."""
    torch.get_num_threads()  # or torch would set the number at the first operation
    if (set_threads := openmp_setter()) is not None:
        set_threads(1)


def _made(name: str, make: Make, inputs: int) -> list[QuantizedWeight]:
    try:
        made = make(inputs)
    except MatrixBroken as error:
        raise ModelRefused(f"the quantized matrix {name} {error}") from None
    return made if isinstance(made, list) else [made]
