"""Serve tiny models with tensor parallelism, one after the other: `python -m support.divided_models COUNT FAMILY ...`

All ranks run this module. Rank 0 prints a JSON object for each family, with the answers by request, divided and whole.
The name of a family behind "fused " is served with the fused forward pass. ALTERED, the last one, ends all ranks.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from support.adapters import save_adapter
from support.families import VOCAB_SIZE, tiny_config, tiny_model
from support.inprocess import InProcess

from lineclear.process.parent_death import die_with_parent
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import Sampling
from lineclear.worker.model.division import load_divided
from lineclear.worker.model.loaded_model import LoadedModel
from lineclear.worker.model.loader import build_fused, wrap_model
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions
from lineclear.worker.runner.rank_runner import FollowingRunner, LeadingRunner, follow
from lineclear.worker.tensor_parallel.ranks import Kind, Ranks

_OPTIONS = RunnerOptions(num_blocks=256, block_size=4, num_slots=16, max_step_tokens=512)
_LIMITS = CoreLimits(max_batch_size=16, target_batch_tokens=24, prefix_cache=False)
_GREEDY = Sampling(stop_ids=(2,))
_SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "word_embed_proj_dim": 64,
}
"""Heads that four ranks can divide."""
FUSED = "fused "
_FUSED_SIZES = _SIZES | {"hidden_size": 128, "head_dim": 16}
"""Heads that the kernels can read."""
_NEXT = b"next"
ALTERED = "altered"
"""A llama of which one rank draws another token in its third step."""


class Alone:
    """torch.distributed of a rank whose other ranks have the same parts in a gather, and nothing in a sum."""

    def __init__(self, count: int, note: Callable[[str], object] = lambda name: None) -> None:
        """`note` is called with the name of each collective."""
        self._count, self._note = count, note

    def get_world_size(self) -> int:
        return self._count

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._note("all_reduce")

    def all_gather_single(self, parts: torch.Tensor, own: torch.Tensor) -> None:
        self._note("all_gather")
        parts.view(self._count, *own.shape).copy_(own)


class _Ranks(Ranks):
    """Ranks that serve one model after the other."""

    def receive(self, kind: Kind) -> bytes:
        message = super().receive(kind)
        if message == _NEXT:
            raise EOFError
        return message


def model_of(family: str) -> Any:
    """Return a tiny model of a family whose heads four ranks can divide."""
    name = "llama" if family == ALTERED else family.removeprefix(FUSED)
    config, sizes = tiny_config(name), _SIZES if name == family else _FUSED_SIZES
    changes = {key: size for key, size in sizes.items() if hasattr(config, key)}
    if hasattr(config, "kv_lora_rank"):  # latent attention has keys for each head
        changes["num_key_value_heads"] = changes["num_attention_heads"]
    return tiny_model(name, **changes)


def load(ranks: Ranks, family: str) -> LoadedModel:
    """Return the part of a rank, as a worker loads it."""
    loaded = load_divided(ranks, lambda: model_of(family), wrap_model)
    fused = build_fused(loaded, agree=ranks.agree) if family.startswith(FUSED) else loaded
    assert fused is not None
    return fused


def requests() -> list[Request]:
    """Return greedy and sampled requests; their prompts need several chunks."""
    rng = random.Random(5)
    prompts = [tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length)) for length in (5, 1, 16, 33, 9)]
    greedy = [Request(f"greedy-{i}", x, _GREEDY, 10, eos_ids=frozenset({2})) for i, x in enumerate(prompts)]
    sampled = [
        replace(x, request_id=f"sampled-{i}", sampling=replace(_GREEDY, temperature=0.8, top_p=0.9, seed=i))
        for i, x in enumerate(greedy)
    ]
    return greedy + sampled


def answers(runner: ModelRunner, adapter: Path | None) -> dict[str, list[int]]:
    """Return the output of all requests; the last ones use the adapter."""
    server, sent = InProcess(runner, _LIMITS), requests()
    if adapter is not None:
        key = server.load_adapter(adapter)
        sent += [replace(x, request_id=f"adapted-{i}", adapter=key) for i, x in enumerate(sent[:3])]
    return server.serve(sent)


def alter_a_token() -> None:
    """Let this rank draw another token in its third step."""
    sample, steps = ModelRunner._sample, count(1)

    def sample_another(*arguments: Any) -> Any:
        found = sample(*arguments)
        if next(steps) != 3:
            return found
        return found._replace(tokens=found.tokens ^ 1, host_tokens=[token ^ 1 for token in found.host_tokens])

    ModelRunner._sample = staticmethod(sample_another)  # type: ignore[method-assign]


def main(words: list[str]) -> None:
    die_with_parent()  # as the main module of a worker: the other ranks exit with rank 0
    torch.set_num_threads(1)
    ranks = _Ranks.join(int(words[0]), [sys.executable, "-m", "support.divided_models", *words])
    ranks.connect(torch.device("cpu"))
    for family in words[1:]:
        if family == ALTERED and ranks.rank:
            alter_a_token()
        loaded = load(ranks, family)
        if ranks.rank:
            if code := follow(FollowingRunner(ranks, loaded, _OPTIONS), ranks):
                os._exit(code)  # at once, as a worker does: rank 0 waits for a moment only
            continue
        with tempfile.TemporaryDirectory() as folder:
            is_fused = loaded.decoder is not None
            adapter = save_adapter(model_of(family), Path(folder), seed=1) if is_fused else None
            divided = answers(LeadingRunner(ranks, loaded, _OPTIONS), adapter)
            ranks.send(Kind.CALL, _NEXT)
            whole = answers(ModelRunner(wrap_model(model_of(family)), _OPTIONS), adapter)
        heads = [spec.num_kv_heads for spec in loaded.layers]
        found = {"divided": divided, "whole": whole, "kv_heads": heads, "fused": is_fused}
        print(json.dumps({"family": family, **found}), flush=True)
    if not ranks.rank:
        ranks.close()


if __name__ == "__main__":
    main(sys.argv[1:])
