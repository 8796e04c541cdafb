"""Every verified family answers token for token like transformers' `generate`, in any batching and chunking.

`make test` runs every test over some families, and over each one that is left to `make test-exhaustive` the last test.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from e2e.transformers_answers import generated
from support.families import CONFIGS, FURTHER_CONFIGS, RECURRENT_CONFIGS, VOCAB_SIZE, tiny_model
from support.graphs import recorded
from support.inprocess import InProcess
from torch import Tensor
from worker.test_drafts import KnownAnswers

from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import Sampling
from lineclear.worker.attention.base import Batch
from lineclear.worker.attention.registry import BACKENDS
from lineclear.worker.attention.torch_paged import TorchPagedAttention
from lineclear.worker.device.staging import Staging
from lineclear.worker.model.decode_graphs import DecodeGraphs
from lineclear.worker.model.loaded_model import LoadedModel
from lineclear.worker.model.loader import wrap_model
from lineclear.worker.model.verified_families import VERIFIED
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions

BLOCK_SIZE = 4
PROMPT_LENS = (5, 1, 16, 33, 9)
MAX_TOKENS = 10
GREEDY = Sampling(stop_ids=(2,))
LIMITS = CoreLimits(max_batch_size=16, target_batch_tokens=128, prefix_cache=False)


@dataclass(frozen=True)
class Family:
    """A tiny model with its expected answers: greedy from transformers, sampled from running each request alone."""

    loaded: LoadedModel
    requests: list[Request]
    expected: dict[str, list[int]]

    def server(self, limits: CoreLimits = LIMITS, num_blocks: int = 256, swap: int = 0, **parts: Any) -> InProcess:
        options = RunnerOptions(num_blocks=num_blocks, block_size=BLOCK_SIZE, num_slots=16, max_step_tokens=512)
        runner = ModelRunner(self.loaded, replace(options, swap_memory_bytes=swap), **parts)
        runner._swap_seconds = 0.0  # so that it is always cheaper
        return InProcess(runner, limits)


def greedy(name: str, prompt: tuple[int, ...]) -> Request:
    return Request(name, prompt, GREEDY, MAX_TOKENS, eos_ids=frozenset({2}))


def prompts() -> list[tuple[int, ...]]:
    rng = random.Random(5)
    return [tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length)) for length in PROMPT_LENS]


FAMILIES = [*sorted(CONFIGS), *(pytest.param(x, marks=pytest.mark.exhaustive) for x in sorted(FURTHER_CONFIGS))]


@pytest.fixture(scope="module", params=FAMILIES, name="family")
def make_family(request: pytest.FixtureRequest) -> Family:
    asked = [greedy(f"greedy-{i}", prompt) for i, prompt in enumerate(prompts())]
    expected = generated(tiny_model(request.param), asked, eos_token_id=2)
    sampled = [
        replace(x, request_id=f"sampled-{i}", sampling=replace(GREEDY, temperature=0.8, top_p=0.9, seed=i + 1))
        for i, x in enumerate(asked)
    ]
    family = Family(wrap_model(tiny_model(request.param)), asked + sampled, expected)
    for x in sampled:
        expected |= family.server().serve([x])
    return family


def test_alone(family: Family) -> None:
    server = family.server()
    for x in family.requests[: len(PROMPT_LENS)]:  # the expected sampled answers are from requests run alone
        assert server.serve([x])[x.request_id] == family.expected[x.request_id]


@pytest.mark.parametrize("pipeline_depth", [1, 3])
def test_in_one_batch(family: Family, pipeline_depth: int) -> None:
    # All prompts fit into the first step: a worker that has measured no step yet takes few tokens beside decodes.
    num_tokens = sum(len(x.prompt) for x in family.requests)
    server = family.server(replace(LIMITS, pipeline_depth=pipeline_depth, target_batch_tokens=num_tokens))
    assert server.serve(family.requests) == family.expected
    assert len(server.plans[0].rows) == len(family.requests)


def test_with_prompts_in_chunks(family: Family) -> None:
    server = family.server(replace(LIMITS, target_batch_tokens=7))
    assert server.serve(family.requests) == family.expected
    assert all(sum(row.num_tokens for row in plan.rows) <= 7 for plan in server.plans)


def test_with_preemption_and_prefix_cache(family: Family) -> None:
    server = family.server(replace(LIMITS, prefix_cache=True), num_blocks=20)
    assert server.serve(family.requests) == family.expected
    assert server.counters.preemptions > 0


def test_with_swapped_blocks(family: Family) -> None:
    """In the second round at the latest, when the steps of the first are measured."""
    server = family.server(num_blocks=20, swap=1 << 20)
    assert server.serve(family.requests) == family.expected
    again = server.serve([replace(x, request_id=f"again-{x.request_id}") for x in family.requests])
    assert list(again.values()) == list(family.expected.values())
    assert 0 < server.counters.swapped_in_tokens <= server.counters.swapped_out_tokens


def test_with_a_cached_prefix(family: Family) -> None:
    server = family.server(replace(LIMITS, prefix_cache=True))
    server.serve(family.requests)
    again = server.serve([replace(x, request_id=f"again-{x.request_id}") for x in family.requests])
    assert again == {f"again-{name}": tokens for name, tokens in family.expected.items()}
    for x in family.requests:
        # Never the last prompt token: the first token is sampled from its logits.
        kept = (len(x.prompt) + server.finished(x.request_id).stats.completion_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        is_part_kept = len(x.prompt) % BLOCK_SIZE >= BLOCK_SIZE // 4
        wanted = min(len(x.prompt) - 1, max(kept, len(x.prompt) * is_part_kept))
        assert server.finished(f"again-{x.request_id}").stats.cached_tokens == wanted


def test_after_the_loss_of_the_worker(family: Family) -> None:
    server = family.server()
    assert server.serve(family.requests, lose_worker_after_steps=6) == family.expected
    assert server.finished("greedy-3").stats.recoveries == 1


def test_with_arrays_copied_once_a_step(family: Family) -> None:
    """As on a GPU: what a step reads is staged and arrives in one copy, after the step is prepared."""
    staging = Staging(torch.device("cpu"), 1 << 20, is_direct=False)
    server = family.server(replace(LIMITS, prefix_cache=True, pipeline_depth=2), 20, staging=staging)
    assert server.serve(family.requests) == family.expected
    assert server.counters.preemptions > 0
    assert staging.num_copies == len(server.plans)


class Capturable(TorchPagedAttention):
    """As a backend whose kernels a CUDA graph can hold."""

    num_splits = 0
    seen: ClassVar[list[Batch]] = []

    def start_step(self, batch: Batch) -> None:
        self.seen.append(batch)
        super().start_step(batch)

    @property
    def step_inputs(self) -> tuple[Tensor]:
        return (self._cells,)


def test_with_decode_steps_from_graphs(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded steps give the same tokens, on the same addresses; padding rows write to a block of their own."""
    monkeypatch.setitem(BACKENDS, "torch_paged", Capturable)
    monkeypatch.setattr(Capturable, "seen", [])
    graphs, staging = DecodeGraphs([1, 3, 8], recorded), Staging(torch.device("cpu"), 1 << 20, is_direct=False)
    server = family.server(replace(LIMITS, prefix_cache=True, pipeline_depth=2), 20, staging=staging, graphs=graphs)
    assert server.serve(family.requests) == family.expected
    plans = [
        x for x in server.plans if 0 < x.num_rows <= 8 and x.num_tokens == x.num_rows and all(y.sample for y in x.rows)
    ]
    padding = [sum(cell >= 20 * BLOCK_SIZE for cell in batch.cells.tolist()) for batch in Capturable.seen]
    assert graphs.num_replays == len(plans) > 10
    assert sum(padding) == sum(graphs.padded(plan.num_rows) - plan.num_rows for plan in plans) > 0
    assert staging.num_copies == len(server.plans)


def test_every_verified_family_is_tested() -> None:
    assert set(CONFIGS | FURTHER_CONFIGS | RECURRENT_CONFIGS) == VERIFIED  # the last in test_recurrent_families.py


@pytest.mark.parametrize("family", sorted(FURTHER_CONFIGS))
def test_in_every_way_at_once(family: str) -> None:
    model = tiny_model(family)
    asked = [Request(f"greedy-{i}", prompt, Sampling(), MAX_TOKENS) for i, prompt in enumerate(prompts()[2:4])]
    expected = generated(model, asked, eos_token_id=None)  # answers of full length, so that some are preempted
    drafter = KnownAnswers(asked, expected)
    options = RunnerOptions(num_blocks=20, block_size=BLOCK_SIZE, num_slots=4, max_step_tokens=64)
    limits = replace(LIMITS, target_batch_tokens=11, prefix_cache=True, adaptive_drafts=False)
    server = InProcess(ModelRunner(wrap_model(model), options, drafter=drafter), limits)
    assert server.serve(asked, lose_worker_after_steps=3) == expected
    again = [replace(x, request_id=f"again-{i}-{x.request_id}", max_drafts=3) for i in range(2) for x in asked]
    assert server.serve(again) == {x.request_id: expected[x.request_id[8:]] for x in again}
    counters = server.counters
    assert counters.preemptions > 0
    assert counters.spec_decode_num_accepted_tokens > 0
    assert server.finished("again-0-greedy-1").stats.cached_tokens > 0
