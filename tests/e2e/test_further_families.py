"""Further families answer like transformers' `generate`: chunked, preempted, cached, with drafts, after a lost worker.

`make test` runs these; `make test-exhaustive` runs each test of test_families.py over them, too.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from e2e.test_families import BLOCK_SIZE, LIMITS, MAX_TOKENS, prompts
from e2e.transformers_answers import generated
from support.families import FURTHER_CONFIGS, tiny_model
from support.inprocess import InProcess
from worker.test_drafts import KnownAnswers

from lineclear.scheduler.core.sequence import Request
from lineclear.wire.sampling import Sampling
from lineclear.worker.model.loader import wrap_model
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions

OPTIONS = RunnerOptions(num_blocks=20, block_size=BLOCK_SIZE, num_slots=4, max_step_tokens=64)


@pytest.mark.parametrize("family", sorted(FURTHER_CONFIGS))
def test_in_every_way_at_once(family: str) -> None:
    model = tiny_model(family)
    asked = [Request(f"greedy-{i}", prompt, Sampling(), MAX_TOKENS) for i, prompt in enumerate(prompts()[2:4])]
    expected = generated(model, asked, eos_token_id=None)  # answers of full length, so that some are preempted
    drafter = KnownAnswers(asked, expected)
    limits = replace(LIMITS, target_batch_tokens=11, prefix_cache=True, adaptive_drafts=False)
    server = InProcess(ModelRunner(wrap_model(model), OPTIONS, drafter=drafter), limits)
    assert server.serve(asked, lose_worker_after_steps=3) == expected
    again = [replace(x, request_id=f"again-{i}-{x.request_id}", max_drafts=3) for i in range(2) for x in asked]
    assert server.serve(again) == {x.request_id: expected[x.request_id[8:]] for x in again}
    counters = server.counters
    assert counters.preemptions > 0
    assert counters.spec_decode_num_accepted_tokens > 0
    assert server.finished("again-0-greedy-1").stats.cached_tokens > 0
