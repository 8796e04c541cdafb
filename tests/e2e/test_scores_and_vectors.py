"""Scores and vectors of prompts equal transformers', whatever runs beside them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.families import CONFIGS, CONTEXT, FURTHER_CONFIGS, RECURRENT_CONFIGS, VOCAB_SIZE, WIDE, tiny_model
from support.inprocess import Failure, InProcess

from lineclear.errors import NonFiniteLogits
from lineclear.scheduler.core.events import Failed, Pooled, Scored
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request, Scoring
from lineclear.wire.messages import Pooling, PoolingKind, RowOutput, Sampling
from lineclear.worker.attention.base import IntArray
from lineclear.worker.model.loaded_model import LoadedModel, ModelForward
from lineclear.worker.model.loader import build_fused, wrap_model
from lineclear.worker.runner.input_batch import OutputRow
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions
from lineclear.worker.runner.scores_and_vectors import PIECE, RowOutputs
from lineclear.worker.sampling.logits import Logits, with_argmax

NUM_TOP = 3
LAST, MEAN = PoolingKind
POOLINGS = [Pooling(LAST, 0, False), Pooling(MEAN, 0, False), Pooling(LAST, 7, True), Pooling(MEAN, 7, True)]
EXACT, EXACT_STATE, BFLOAT16 = 2e-5, 1e-4, 0.25
"""Largest differences. A recurrent state adds up rounding errors of all tokens: gated delta rules give 5e-5 here. In
bfloat16 the logits of these models, up to 30, have steps of 1/8."""


def prompts() -> list[tuple[int, ...]]:
    rng = random.Random(3)
    return [tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length)) for length in (2, 17, 60)]


def requests() -> list[Request]:
    """Return requests for scores, vectors and both answers and scores, with ordinary ones between them."""
    found = []
    for i, prompt in enumerate(prompts()):
        found += [
            Request(f"scored-{i}", prompt, Sampling(), 0, scoring=Scoring(0, NUM_TOP)),
            Request(f"tail-{i}", prompt, Sampling(), 0, scoring=Scoring(len(prompt) - 2)),
            Request(f"both-{i}", prompt, Sampling(), 6, scoring=Scoring(0)),
            Request(f"plain-{i}", prompt, Sampling(), 20),
            *(Request(f"vector-{i}-{k}", prompt, Sampling(), 0, pooling=x) for k, x in enumerate(POOLINGS)),
        ]
    return found


def serve(loaded: LoadedModel, asked: list[Request], lost_after: int = 0, **limits: Any) -> InProcess:
    runner = ModelRunner(loaded, RunnerOptions(num_blocks=256, block_size=16, num_slots=16, max_step_tokens=512))
    server = InProcess(runner, CoreLimits(**limits))
    server.serve(asked, lose_worker_after_steps=lost_after)
    return server


def scores(server: InProcess, request_id: str) -> list[float]:
    events = [event for event in server.events if isinstance(event, Scored) and event.request_id == request_id]
    return [value for event in events for value in event.scores.logprobs]


def vector(server: InProcess, request_id: str) -> torch.Tensor:
    (data,) = [event.vector for event in server.events if isinstance(event, Pooled) and event.request_id == request_id]
    return torch.frombuffer(bytearray(data), dtype=torch.float32)


@torch.inference_mode()
def check(server: InProcess, model: Any, tolerance: float, same_tokens: bool = True) -> None:
    worst = 0.0
    for i, prompt in enumerate(prompts()):
        ids = torch.tensor([prompt])
        expected = torch.log_softmax(model(ids).logits[0].float(), dim=-1)
        chosen = expected[:-1].gather(1, ids[0, 1:, None])[:, 0]
        for name, first in ((f"scored-{i}", 0), (f"tail-{i}", len(prompt) - 2), (f"both-{i}", 0)):
            found = torch.tensor(scores(server, name))
            assert found.shape == chosen[first:].shape, name
            worst = max(worst, float((found - chosen[first:]).abs().max()))
        tops = [e for e in server.events if isinstance(e, Scored) and e.request_id == f"scored-{i}"]
        values = torch.tensor([value for event in tops for value in event.scores.top_logprobs]).view(-1, NUM_TOP)
        worst = max(worst, float((values - expected[:-1].topk(NUM_TOP).values).abs().max()))
        if same_tokens:
            top_ids = torch.tensor([value for event in tops for value in event.scores.top_ids]).view(-1, NUM_TOP)
            assert torch.equal(top_ids, expected[:-1].topk(NUM_TOP).indices)
        hidden = model.get_decoder()(ids).last_hidden_state[0].float()
        for k, (kind, dimensions, normalize) in enumerate(POOLINGS):
            wanted = hidden[-1] if kind is LAST else hidden.mean(dim=0)
            wanted = wanted[: dimensions or None]
            wanted = wanted / wanted.norm() if normalize else wanted
            worst = max(worst, float((vector(server, f"vector-{i}-{k}") - wanted).abs().max()))
    print(f"largest difference {worst:.2g}")
    assert worst < tolerance


@pytest.mark.parametrize(
    "family",
    [
        *sorted(CONFIGS | RECURRENT_CONFIGS),
        *(pytest.param(x, marks=pytest.mark.exhaustive) for x in sorted(FURTHER_CONFIGS)),
    ],
)
def test_each_family(family: str) -> None:
    model = tiny_model(family)
    loaded = wrap_model(tiny_model(family), max_model_len=CONTEXT)
    cache = family not in RECURRENT_CONFIGS  # snapshots of states have tests of their own
    tolerance = EXACT if cache else EXACT_STATE
    check(serve(loaded, requests(), prefix_cache=cache), model, tolerance)
    check(serve(loaded, requests(), target_batch_tokens=24, prefix_cache=cache), model, tolerance)


@pytest.mark.usefixtures("best_and_none")
@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.float32), ("qwen3", torch.bfloat16)], ids=str)
def test_fused_decoder(family: str, dtype: torch.dtype) -> None:
    loaded = build_fused(wrap_model(tiny_model(family, dtype=dtype, **WIDE)))
    assert loaded is not None
    exact = dtype is torch.float32
    for budget in (512, 24):
        server = serve(loaded, requests(), target_batch_tokens=budget)
        check(server, tiny_model(family, dtype=dtype, **WIDE), EXACT if exact else BFLOAT16, same_tokens=exact)


@pytest.mark.parametrize("lost_after", [2, 5])
def test_after_the_loss_of_the_worker(lost_after: int) -> None:
    server = serve(wrap_model(tiny_model("llama")), requests(), lost_after, target_batch_tokens=24)
    check(server, tiny_model("llama"), EXACT)


def test_answers_beside_scores_are_the_same() -> None:
    runner = ModelRunner(wrap_model(tiny_model("llama")), RunnerOptions(num_blocks=256, max_step_tokens=512))
    plain = [x for x in requests() if x.max_tokens == 20]
    alone, beside = InProcess(runner).serve(plain), InProcess(runner).serve(requests())
    assert {name: tokens for name, tokens in beside.items() if name in alone} == alone


def test_values_that_are_not_finite_fail_their_request_only() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[150] = float("nan")
    prompt = (5, 6, 150, 7, 8)
    asked = [
        Request("scored", prompt, Sampling(), 0, scoring=Scoring(0)),
        *(Request(f"vector-{kind.name}", prompt, Sampling(), 0, pooling=Pooling(kind)) for kind in PoolingKind),
        replace(requests()[0], request_id="good"),
    ]
    runner = ModelRunner(wrap_model(model), RunnerOptions(num_blocks=256, num_slots=16, max_step_tokens=512))
    server = InProcess(runner)
    with pytest.raises(Failure):
        server.serve(asked)
    failed = {e.request_id: type(e.error) for e in server.events if isinstance(e, Failed)}
    assert failed == dict.fromkeys(("scored", "vector-LAST", "vector-MEAN"), NonFiniteLogits)
    assert len(scores(server, "good")) == 1


def test_logits_are_projected_in_pieces() -> None:
    """A prompt of 8k tokens with a vocabulary of 152k must not need 5 GB."""
    sizes = []

    def logits(rows: IntArray) -> Logits:
        sizes.append(len(rows))
        return with_argmax(torch.zeros(len(rows), 32))

    outputs = RowOutputs(torch.zeros(1000, dtype=torch.int64), torch.device("cpu"))
    row = OutputRow(RowOutput.SCORE, 0, 0, 900, 0, is_last=False)
    reported = outputs.compute((row,), ModelForward(logits, lambda rows: torch.zeros(len(rows), 8)))
    assert reported.scores is not None
    assert len(reported.scores.logprobs) == sum(sizes) == 900
    assert max(sizes) == PIECE
