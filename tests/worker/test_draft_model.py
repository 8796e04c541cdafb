"""Drafts by a draft model: the tokens are those of plain decoding, whatever the draft model says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import WIDE, tiny_model
from support.inprocess import InProcess
from worker.settings_runner import runner_with

from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import Sampling
from lineclear.worker.model.loaded_model import ModelRefused
from lineclear.worker.model.loader import build_fused, wrap_model
from lineclear.worker.runner.draft_model import check_vocabulary
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions

LIMITS = CoreLimits(max_batch_size=8, adaptive_drafts=False)


def sibling(model: Any, noise: float, **config: Any) -> Any:
    """Return a model that often agrees with `model`: the same weights with noise."""
    other = tiny_model("llama", **WIDE | config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs + noise * theirs.std() * torch.randn(theirs.shape, generator=generator))
    return other


def runners(noise: float = 0.02, num_blocks: int = 200, **config: Any) -> list[ModelRunner]:
    model = tiny_model("llama", **WIDE)
    sizes: dict[str, Any] = {"block_size": 4, "num_slots": 16, "max_step_tokens": 64}
    draft = wrap_model(sibling(model, noise, **config))
    plain = ModelRunner(wrap_model(tiny_model("llama", **WIDE)), RunnerOptions(num_blocks=400, **sizes))
    return [plain, ModelRunner(wrap_model(model), RunnerOptions(num_blocks=num_blocks, **sizes), draft_model=draft)]


def requests_of(count: int, max_tokens: int = 24, prompt_len: int = 20) -> list[Request]:
    """Return requests with drafts, every second one sampled, and plain ones between them."""
    found = []
    for i in range(count):
        prompt = tuple((7 * i + 5 * n * n + 3 * n) % 200 + 5 for n in range(prompt_len + i))
        sampling = Sampling(temperature=0.5 * (i % 2), seed=i)
        found.append(Request(f"r{i}", prompt, sampling, max_tokens, max_drafts=(4, 0, 7)[i % 3]))
    return found


def plainly(requests: list[Request]) -> list[Request]:
    return [replace(request, max_drafts=0) for request in requests]


@pytest.mark.usefixtures("best_and_none")
@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_are_those_of_plain_decoding(depth: int) -> None:
    """Prompts of more tokens than a step are computed by the draft model in pieces. Both models are fused."""
    model = tiny_model("llama", **WIDE)
    draft = build_fused(wrap_model(sibling(model, 0.02)))  # first: the other call frees the weights
    served = build_fused(wrap_model(model))
    assert served is not None
    sizes, limits = RunnerOptions(num_blocks=64, num_slots=8, max_step_tokens=16), replace(LIMITS, pipeline_depth=depth)
    requests = requests_of(8)
    wanted = InProcess(ModelRunner(served, sizes), limits).serve(plainly(requests))
    server = InProcess(ModelRunner(served, sizes, draft_model=draft), limits)
    assert server.serve(requests) == wanted
    counters = server.counters
    assert counters.spec_decode_num_accepted_tokens > 0.2 * counters.spec_decode_num_draft_tokens > 0
    assert counters.spec_decode_num_accepted_tokens < counters.spec_decode_num_draft_tokens


def test_answers_survive_a_lost_worker_and_few_blocks() -> None:
    """Prompts enter a few tokens a step beside decodes. Answers of 30 tokens end before 60 blocks are in use."""
    plain, drafting = runners(num_blocks=60)
    requests = requests_of(7, max_tokens=60)
    server = InProcess(drafting, LIMITS)
    assert server.serve(requests, lose_worker_after_steps=9) == InProcess(plain, LIMITS).serve(plainly(requests))
    assert server.counters.preemptions > 0
    assert server.counters.spec_decode_num_accepted_tokens > 0.2 * server.counters.spec_decode_num_draft_tokens > 0


def test_same_model_drafts_right_also_over_shared_blocks_and_after_pauses() -> None:
    """A draft model with the served weights is wrong only where its keys and values are not those of the tokens."""
    plain, drafting = runners(noise=0.0)
    prompt = tuple((5 * n * n + 3 * n) % 200 + 5 for n in range(41))
    requests = [Request(f"r{i}", (*prompt, 7 + i) if i % 2 else prompt, Sampling(), 30, max_drafts=5) for i in range(6)]
    server = InProcess(drafting, CoreLimits(max_batch_size=3, adaptive_drafts=False))
    assert server.serve(requests) == InProcess(plain, LIMITS).serve(plainly(requests))
    counters = server.counters
    assert counters.prefix_cache_hits > 0
    assert counters.spec_decode_num_accepted_tokens == counters.spec_decode_num_draft_tokens > 100


def test_rejected_drafts_do_not_spoil_the_next_ones() -> None:
    """With a served model that samples, most drafts of its greedy twin are wrong; those after them are as good."""
    plain, drafting = runners(noise=0.0)
    hot = [
        Request(f"r{i}", tuple(range(9 + i, 30 + i)), Sampling(temperature=1.0, seed=i), 40, max_drafts=6)
        for i in range(4)
    ]
    server = InProcess(drafting, LIMITS)
    assert server.serve(hot) == InProcess(plain, LIMITS).serve(plainly(hot))
    rejected = server.counters.spec_decode_num_draft_tokens - server.counters.spec_decode_num_accepted_tokens
    assert rejected > 50
    greedy = replace(hot[0], request_id="greedy", sampling=Sampling())
    before = server.counters
    assert server.serve([greedy]) == InProcess(plain, LIMITS).serve(plainly([greedy]))
    drafted = server.counters.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens
    assert server.counters.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens == drafted > 20


def test_draft_model_with_a_shorter_context_stops_drafting() -> None:
    plain, drafting = runners(max_position_embeddings=40)
    requests = requests_of(3, max_tokens=40)
    server = InProcess(drafting, LIMITS)
    assert server.serve(requests) == InProcess(plain, LIMITS).serve(plainly(requests))
    longer = InProcess(runners()[1], LIMITS)
    longer.serve(requests)
    assert 0 < server.counters.spec_decode_num_draft_tokens < longer.counters.spec_decode_num_draft_tokens


def directory_with(folder: Path, vocabulary: dict[str, int]) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    return folder


def test_draft_model_with_other_ids_is_refused(tmp_path: Path) -> None:
    served = wrap_model(tiny_model("llama", **WIDE))
    same = directory_with(tmp_path / "a", {"x": 0, "y": 1, "z": 2})
    other = directory_with(tmp_path / "b", {"x": 0, "z": 1, "y": 2})
    check_vocabulary(replace(served, directory=same), replace(served, directory=same))
    with pytest.raises(ModelRefused, match="other ids for 2 tokens"):
        check_vocabulary(replace(served, directory=same), replace(served, directory=other))


def test_worker_refuses_a_draft_model_with_another_vocabulary(tmp_path: Path) -> None:
    """A worker that is started by hand, too: no scheduler has compared the files."""
    tiny_model("llama", **WIDE).save_pretrained(tmp_path / "served")
    tiny_model("llama").save_pretrained(tmp_path / "draft")
    with pytest.raises(ModelRefused, match="211 token ids and the served model 256"):
        runner_with(tmp_path / "served", draft_model=str(tmp_path / "draft"))
