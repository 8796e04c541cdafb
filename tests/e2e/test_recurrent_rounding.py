"""Answers of models with a recurrent state differ by rounding alone, whatever comes between.

Rows of several tokens and of one round these layers differently in float32. Computed in float64, an answer has the
log-probabilities of the request alone: after lost workers and preemptions, and from snapshots in the middle of prompts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.families import CONTEXT, VOCAB_SIZE, tiny_model
from support.inprocess import InProcess

from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import Sampling
from lineclear.worker.model.compatibility_probe import TOLERANCE
from lineclear.worker.model.loaded_model import LoadedModel
from lineclear.worker.model.loader import wrap_model
from lineclear.worker.recurrent.states import RecurrentStates
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions
from lineclear.worker.sampling.logits import with_argmax

_NUM_SLOTS, _TINY = 6, 2e-6  # a bit of a log-probability in float32


@contextmanager
def float32_is_float64() -> Iterator[None]:
    """Let modules that compute some of their operations in float32 compute them in float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        yield


@pytest.fixture(params=["qwen3_next", "granitemoehybrid", "jamba", "lfm2"], name="loaded")
def in_float64(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """Return a model that computes in float64, and rounds its logits to float32."""
    computed, float32 = LoadedModel.logits, torch.float32

    def logits(loaded: LoadedModel, *inputs: Any) -> Any:
        with float32_is_float64():
            found = computed(loaded, *inputs)
        return with_argmax(found.values.to(float32))

    monkeypatch.setattr(LoadedModel, "logits", logits)
    monkeypatch.setitem(TOLERANCE, torch.float64, 1e-5)
    model = tiny_model(request.param).double()
    model.set_experts_implementation("eager")  # torch's grouped product has no float64
    with float32_is_float64():
        return wrap_model(model, max_model_len=CONTEXT)


def requests() -> list[Request]:
    """Return requests whose prompts share beginnings of several lengths, and are not whole numbers of blocks."""
    rng = random.Random(3)
    text = [rng.randrange(3, VOCAB_SIZE) for _ in range(70)]
    prompts = [(*text[:shared], *(rng.randrange(3, VOCAB_SIZE) for _ in range(5))) for shared in (0, 17, 33, 50, 66)]
    kinds = (Sampling(logprobs=1), Sampling(temperature=0.8, top_p=0.9, seed=7, logprobs=1))
    return [
        Request(f"{at}-{kind}", prompt, sampling, 30)
        for at, prompt in enumerate(prompts)
        for kind, sampling in enumerate(kinds)
    ]


def server_of(loaded: LoadedModel, num_blocks: int, limits: CoreLimits) -> InProcess:
    options = RunnerOptions(num_blocks=num_blocks, block_size=4, num_slots=_NUM_SLOTS, num_state_snapshots=9)
    return InProcess(ModelRunner(loaded, options), limits)


def largest_difference(loaded: LoadedModel) -> float:
    """Return how much a log-probability, of any token of all requests, differs from that of the request alone."""
    alone = server_of(loaded, 64, CoreLimits(max_batch_size=1, prefix_cache=False, pipeline_depth=1))
    tokens = {x.request_id: alone.serve([x])[x.request_id] for x in requests()}
    busy = server_of(loaded, 36, CoreLimits(max_batch_size=_NUM_SLOTS, target_batch_tokens=24, pipeline_depth=2))
    found = busy.serve(requests()[::2], lose_worker_after_steps=9) | busy.serve(
        requests()[1::2], lose_worker_after_steps=13
    )
    assert busy.counters.preemptions > 0
    assert busy.counters.prefix_cache_hits > 30
    differences = [0.0]
    for name, right in tokens.items():
        both = zip(alone.logprobs(name), busy.logprobs(name), right, found[name], strict=True)
        differences += [abs(a.logprob - b.logprob) if token == other else 1.0 for a, b, token, other in both]
    return max(differences)


def test_without_rounding_every_answer_is_that_of_the_request_alone(loaded: LoadedModel) -> None:
    assert largest_difference(loaded) < _TINY


def test_a_state_of_other_tokens_is_found(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = RecurrentStates.copy
    monkeypatch.setattr(
        RecurrentStates, "copy", lambda states, copies: copy(states, [(_NUM_SLOTS, target) for _, target in copies])
    )
    assert largest_difference(loaded) > 100 * _TINY
