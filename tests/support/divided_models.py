"""Serve tiny models with tensor parallelism, one after the other: `python -m support.divided_models COUNT FAMILY ...`

All ranks run this module. Rank 0 prints a JSON object with the answers of each family by request, divided and whole.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from typing import Any

import torch
from support.families import VOCAB_SIZE, tiny_config, tiny_model
from support.inprocess import InProcess

from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import Sampling
from lineclear.worker.model.division import load_divided
from lineclear.worker.model.loader import wrap_model
from lineclear.worker.model_runner import ModelRunner, RunnerOptions
from lineclear.worker.rank_runner import FollowingRunner, LeadingRunner, follow
from lineclear.worker.ranks import Kind, Ranks

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
_NEXT = b"next"


class _Ranks(Ranks):
    """Ranks that serve one model after the other."""

    def receive(self, kind: Kind) -> bytes:
        message = super().receive(kind)
        if message == _NEXT:
            raise EOFError
        return message


def model_of(family: str) -> Any:
    """Return a tiny model of a family whose heads four ranks can divide."""
    config = tiny_config(family)
    return tiny_model(family, **{name: size for name, size in _SIZES.items() if hasattr(config, name)})


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


def main(words: list[str]) -> None:
    count, families = int(words[0]), words[1:]
    torch.set_num_threads(1)
    ranks = _Ranks.join(count, [sys.executable, "-m", "support.divided_models", *words])
    ranks.connect(torch.device("cpu"))
    found: dict[str, Any] = {}
    for family in families:
        loaded = load_divided(ranks, lambda family=family: model_of(family), wrap_model)
        if ranks.rank:
            if code := follow(FollowingRunner(ranks, loaded, _OPTIONS), ranks):
                sys.exit(code)
            continue
        divided = InProcess(LeadingRunner(ranks, loaded, _OPTIONS), _LIMITS).serve(requests())
        ranks.send(Kind.CALL, _NEXT)
        whole = InProcess(ModelRunner(wrap_model(model_of(family)), _OPTIONS), _LIMITS).serve(requests())
        heads = [spec.num_kv_heads for spec in loaded.layers]
        found[family] = {"divided": divided, "whole": whole, "kv_heads": heads}
    if not ranks.rank:
        print(json.dumps(found))
        ranks.close()


if __name__ == "__main__":
    main(sys.argv[1:])
