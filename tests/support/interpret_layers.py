"""Runs the Triton kernels of a layer, and whole models on them, in Triton's interpreter on a CPU: a JSON line each.

    TRITON_INTERPRET=1 python -m support.interpret_layers FIRST_SEED END_SEED FAMILY...

The variable has to be set before triton is imported, hence the process. No bfloat16: see interpret_attention.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import structlog
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from lineclear.worker.cuda import layer_kernels
from lineclear.worker.decoder.decoder_layers import ACTIVATIONS, Norm
from lineclear.worker.lora.adapter_set import AdapterSet, Factors
from lineclear.worker.model import compatibility_probe, loader
from lineclear.worker.model.compatibility_probe import paged_logits, relative_error
from lineclear.worker.model.loaded_model import LoadedModel

from .families import CONTEXT, tiny_model

ADAPTED = "llama"
"""The model that runs with an adapter too."""
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "ministral3": {  # whose queries are not scaled in this context
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": CONTEXT,
        }
    },
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
}


class Case:
    """Rows of random widths through each kernel. The references compute in float64."""

    def __init__(self, seed: int) -> None:
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.dtype = torch.float32 if seed % 2 else torch.float16
        self.count = self.rng.randint(1, 3)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) * scale).to(self.dtype)

    def norm(self, width: int) -> Norm | None:
        return Norm(self.normal(width).float(), self.rng.choice([1e-5, 1e-6])) if self.rng.random() < 0.6 else None

    def add_norm(self) -> tuple[dict[str, Any], float]:
        width, scale = self.rng.choice([48, 64, 896, 2048]), self.rng.choice([1.0, 0.22])
        residual, add, norm = self.normal(5, width, scale=3), self.normal(5, width), self.norm(width)
        if norm is not None and self.rng.random() < 0.5:
            norm = replace(norm, bias=self.normal(width).float())
        before = self.norm(width)
        has_add, rows = self.rng.random() < 0.8, torch.tensor([4, 0, 4]) if self.rng.random() < 0.4 else None
        if not has_add:
            rows, before = None, None
        found = layer_kernels.add_norm(residual, add if has_add else None, before, norm, scale, rows)
        wanted = residual.double()
        if has_add:
            wanted = wanted + scale * (normed(add.double(), before) if before else add.double())
        if rows is not None:
            wanted = wanted[rows]
        # The norm is of the rounded sum.
        after = normed(found[0].double(), norm) if norm else wanted
        shape = {"width": width, "scale": scale, "adds": has_add, "rows": rows is not None}
        return shape | {"norms": [before is not None, norm is not None]}, worst(found, (wanted, after))

    def rotate(self) -> tuple[dict[str, Any], float]:
        kv_heads, group, dim = self.rng.choice([1, 2, 3]), self.rng.choice([1, 2, 7]), self.rng.choice([8, 16, 80, 128])
        heads, width = kv_heads * group, self.rng.choice([0, dim, dim // 2])
        pairs = self.rng.random() < 0.5
        is_whole = self.rng.random() < 0.4
        qkv = self.normal(self.count, heads + 2 * kv_heads, dim)
        norm = (
            Norm(self.normal((heads + kv_heads) * dim).float(), 1e-6) if is_whole or self.rng.random() < 0.4 else None
        )
        angles = torch.rand(9, width // 2, generator=self.generator, dtype=torch.float64) * 7
        table = torch.cat([angles.cos(), angles.sin()], 1).to(self.dtype)
        positions = torch.randint(0, 9, (self.count,), generator=self.generator)
        found = layer_kernels.rotate(qkv, (heads, kv_heads), positions, table if width else None, norm, is_whole, pairs)
        x = qkv[:, : heads + kv_heads].double()
        if norm is not None:
            parts = x.split([heads, kv_heads], 1) if is_whole else [x]
            axes = (1, 2) if is_whole else (2,)
            x = torch.cat([y * (y.pow(2).mean(axes, keepdim=True) + norm.eps).rsqrt() for y in parts], 1)
            x = x * norm.weight.double().view(x.shape[1], dim)
        cosine, sine = (y[:, None] for y in table.double()[positions].chunk(2, 1))
        turned = x[..., :width]
        first, second = (turned[..., ::2], turned[..., 1::2]) if pairs else turned.chunk(2, -1)
        both = first * cosine - second * sine, second * cosine + first * sine
        rotated = torch.stack(both, -1).flatten(-2) if pairs else torch.cat(both, -1)
        shape = {
            "heads": heads,
            "kv_heads": kv_heads,
            "dim": dim,
            "rotated": width,
            "is_whole": is_whole,
            "pairs": pairs,
        }
        return shape | {"norms": norm is not None}, worst([found], [torch.cat([rotated, x[..., width:]], -1)])

    def activate(self) -> tuple[dict[str, Any], float]:
        width, name = self.rng.choice([40, 96, 1024, 1100, 2816]), self.rng.choice(sorted(ACTIVATIONS))
        gated = self.rng.random() < 0.5
        x = self.normal(self.count, 2 * width if gated else width, scale=4)
        found = layer_kernels.activate(x, width, ACTIVATIONS[name])
        wanted = ACT2FN[name](x[:, :width].double())
        wanted = wanted * x[:, width:].double() if gated else wanted
        return {"width": width, "activation": name, "gated": gated}, worst([found], [wanted])


def normed(x: Tensor, norm: Norm) -> Tensor:
    if norm.bias is not None:
        return F.layer_norm(x, x.shape[-1:], norm.weight.double(), norm.bias.double(), norm.eps)
    return x * (x.pow(2).mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()


def worst(found: Any, wanted: Any) -> float:
    """Return the largest difference relative to the value, or to 1 for smaller ones."""
    return max(float(((x - y).abs() / y.abs().clamp_min(1)).max()) for x, y in zip(found, wanted, strict=True))


def kernels(first: int, end: int) -> Iterator[dict[str, Any]]:
    for seed in range(first, end):
        case = Case(seed)
        for make in (case.add_norm, case.rotate, case.activate):
            shape, error = make()
            yield {"kernel": make.__name__, "seed": seed, "dtype": str(case.dtype), **shape, "error": error}


def adapted_logits(loaded: LoadedModel) -> Tensor:
    """Return the probe's logits with an adapter of all linear layers for some of its tokens."""
    adapters = AdapterSet(loaded.model, loaded.dtype, loaded.device, has_hooks=loaded.decoder is None)
    torch.manual_seed(1)
    factors = {
        name: Factors(torch.randn(4, module.in_features), torch.randn(4, module.out_features), 0.05)
        for name, module in vars(adapters)["_modules"].items()
    }
    vars(adapters)["_adapters"][1] = factors
    adapters._changed()
    if loaded.decoder is not None:
        loaded.decoder.use_adapters(adapters)
    adapters.start_step(np.array([1, 0, 1], np.int32))
    logits = paged_logits(loaded)
    adapters.clear()
    adapters.start_step(None)
    return logits


def models(families: Sequence[str]) -> Iterator[dict[str, Any]]:
    errors: list[float] = []

    def noted(computed: Tensor, expected: Tensor) -> float:
        errors.append(relative_error(computed, expected))
        return errors[-1]

    compatibility_probe.NUM_TOKENS = 9
    loader.relative_error = noted
    for place, family in enumerate(families):
        dtype = torch.float16 if place == 0 else torch.float32
        loaded = loader.wrap_model(tiny_model(family, dtype=dtype, **CHANGES.get(family, {})))
        wanted, size = loaded.probe_logits, loaded.weight_bytes
        assert wanted is not None
        fused = loader.build_cuda(loaded)
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in loaded.model.parameters()}
        adapted = [adapted_logits(x) for x in (fused, loaded)] if family == ADAPTED else None
        yield {
            "family": family,
            "dtype": str(dtype),
            "is_used": fused.decoder is not None,
            "error": errors[-1],
            "error_of_modules": relative_error(paged_logits(loaded), wanted),
            "extra_bytes": sum(storages.values()) - size,
            "error_of_adapter": relative_error(*adapted) if adapted else None,
            "change_by_adapter": relative_error(adapted[0], wanted) if adapted else None,
        }


def main(first: str, end: str, *families: str) -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    for entry in (*kernels(int(first), int(end)), *models(families)):
        print(json.dumps(entry), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
