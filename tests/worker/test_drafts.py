"""Rows that verify drafts by prompt lookup, on a real model: the tokens are those of plain decoding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.events import TokensReady
from support.families import WIDE, tiny_model
from support.inprocess import Failure, InProcess

from lineclear.scheduler.core.events import Failed, Finished, FinishReason
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import Row, RowOutput, Sampling, SlotInit, StepPlan
from lineclear.worker.drafts.verification import Drafter, Drafts, ReadTokens
from lineclear.worker.loop.runner_interface import StepFailed
from lineclear.worker.model.loader import build_fused, wrap_model
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions

LIMITS = CoreLimits(max_batch_size=8, adaptive_drafts=False)


def runner_of(model: Any, num_blocks: int = 200, drafter: Drafter | None = None) -> ModelRunner:
    return ModelRunner(
        wrap_model(model), RunnerOptions(num_blocks=num_blocks, block_size=4, num_slots=16), drafter=drafter
    )


def repeating(number: int, max_tokens: int = 24, **sampling: Any) -> Request:
    """Return a request whose prompt repeats itself."""
    base = [(7 * number + 3 * i) % 190 + 5 for i in range(6)]
    prompt = tuple(base * 3 + base[:2])
    return Request(f"r{number}", prompt, Sampling(**sampling), max_tokens, max_drafts=5)


def plainly(requests: Iterable[Request]) -> list[Request]:
    return [replace(request, max_drafts=0) for request in requests]


class FixedDrafts:
    """A drafter of the same drafts for every row."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)

    def reset(self) -> None:
        pass

    def forget(self, slot: int) -> None:
        pass

    def propose(self, rows: Iterable[Row], read_tokens: ReadTokens) -> Drafts:
        return {row.slot: self._tokens[: row.num_drafts] for row in rows}


class KnownAnswers(FixedDrafts):
    """A drafter that knows the right tokens, and drafts a wrong one now and then."""

    def __init__(self, requests: Iterable[Request], answers: dict[str, list[int]]) -> None:
        self._texts = [(request.prompt, [*request.prompt, *answers[request.request_id]]) for request in requests]

    def propose(self, rows: Iterable[Row], read_tokens: ReadTokens) -> Drafts:
        found: dict[int, list[int]] = {}
        for row in rows:
            known = read_tokens(row.slot, 0, row.start + 1)
            (text,) = (text for prompt, text in self._texts if tuple(known[: len(prompt)]) == prompt)
            right = text[len(known) : len(known) + row.num_drafts]
            found[row.slot] = [token if (len(known) + i) % 7 else token ^ 1 for i, token in enumerate(right)]
        return {slot: drafts for slot, drafts in found.items() if drafts}


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 5},
    "truncated": {"temperature": 1.2, "seed": 6, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "repetition": {"repetition_penalty": 1.4},
    "frequency": {"temperature": 0.3, "seed": 7, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    "biased": {"logit_bias": ((11, 3.0), (12, -4.0)), "banned_ids": (20, 21)},
    "allowed": {"allowed_ids": (30, 31, 32, 33), "temperature": 1.0, "seed": 1},
    "logprobs": {"logprobs": 3, "logprob_ids": (5, 90), "temperature": 0.5, "seed": 9},
    "min_tokens": {"min_tokens": 10, "stop_ids": tuple(range(5, 200, 3))},
    "dry": {"dry_multiplier": 2.0, "dry_base": 2.0, "dry_allowed_length": 1, "dry_breaker_ids": (9,)},
    "ngrams": {"no_repeat_ngram_size": 2, "temperature": 0.2, "seed": 10},
    "words": {"bad_words": ((40, 41), (50, 51, 52)), "begin_banned_ids": (30,), "forced_first_id": 44},
    "decay": {"exponential_decay_start": 4, "exponential_decay_factor": 1.3, "stop_ids": tuple(range(7, 200, 5))},
    "reshaped": {"temperature": 1.0, "seed": 11, "typical_p": 0.8, "top_n_sigma": 2.0, "xtc_probability": 0.5},
    "stop": {"stop_ids": tuple(range(6, 200, 17)), "temperature": 0.6, "seed": 12},
}


@pytest.mark.usefixtures("best_and_none")
@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_are_those_of_plain_decoding(depth: int) -> None:
    """Every kind of sampling in one batch, with rows that decode plainly beside them."""
    requests = [repeating(i, **sampling) for i, sampling in enumerate(KINDS.values())]
    others = [replace(repeating(50 + i, temperature=0.9, seed=i), max_drafts=0) for i in range(3)]
    fused = build_fused(wrap_model(tiny_model("llama", **WIDE)))
    assert fused is not None
    sizes, limits = RunnerOptions(num_blocks=64, num_slots=24), replace(LIMITS, pipeline_depth=depth)
    plain = InProcess(ModelRunner(fused, sizes), limits)
    wanted = plain.serve(plainly([*requests, *others]))
    drafted = InProcess(ModelRunner(fused, sizes, drafter=KnownAnswers(requests, wanted)), limits)
    assert drafted.serve([*requests, *others]) == wanted
    name = f"r{list(KINDS).index('logprobs')}"
    rounded = [
        [(round(entry.logprob, 4), [i for i, _ in entry.top]) for entry in server.logprobs(name)]
        for server in (drafted, plain)
    ]
    assert rounded[0] == rounded[1]
    counters = drafted.counters
    assert 0 < counters.spec_decode_num_accepted_tokens < counters.spec_decode_num_draft_tokens, (
        "some drafts are accepted, others are not"
    )
    ends = {e.request_id: e for e in drafted.events if isinstance(e, Finished)}
    assert all(ends[request.request_id].stats.accepted_tokens > 0 for request in requests)
    reasons = {name: ends[f"r{i}"].reason for i, name in enumerate(KINDS)}
    assert reasons["greedy"] is FinishReason.LENGTH
    assert {reasons[name] for name in ("min_tokens", "decay", "stop")} == {FinishReason.STOP_TOKEN}
    assert counters.steps < plain.counters.steps
    assert plain.counters.spec_decode_num_drafts == 0


def test_answers_survive_a_lost_worker_and_few_blocks() -> None:
    requests = [repeating(i, max_tokens=30, temperature=0.7 * (i % 2), seed=i) for i in range(6)]
    model = tiny_model("llama")
    wanted = InProcess(runner_of(model), LIMITS).serve(plainly(requests))
    server = InProcess(runner_of(model, num_blocks=40), LIMITS)
    assert server.serve(requests, lose_worker_after_steps=9) == wanted
    assert server.counters.preemptions > 0
    assert server.counters.spec_decode_num_accepted_tokens > 0


def test_prefix_cache_has_no_rejected_drafts() -> None:
    """A second turn of a conversation reads the blocks of the first."""
    model = tiny_model("llama")
    firsts = [repeating(number, max_tokens=17) for number in range(6)]
    alone = InProcess(runner_of(model), replace(LIMITS, prefix_cache=False))
    answers = alone.serve(plainly(firsts))
    server = InProcess(runner_of(tiny_model("llama"), drafter=KnownAnswers(firsts, answers)), LIMITS)
    for first in firsts:
        answer = server.serve([first])[first.request_id]
        second = replace(first, request_id="second", prompt=(*first.prompt, *answer, 9, 9), max_drafts=0)
        assert server.serve([second]) == alone.serve([second])
    assert server.counters.prefix_cache_hits > 0
    assert server.counters.spec_decode_num_draft_tokens > server.counters.spec_decode_num_accepted_tokens > 0


@pytest.mark.usefixtures("best_and_none")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_draft_with_values_that_are_not_finite_is_only_rejected(family: str) -> None:
    """Token 7 embeds to NaN, and every second draft is token 7."""
    model = tiny_model(family)
    requests = [repeating(i, banned_ids=(7,)) for i in range(4)]
    wanted = InProcess(runner_of(model), LIMITS).serve(plainly(requests))
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = float("nan")
    server = InProcess(runner_of(model, drafter=FixedDrafts((40, 7, 41, 7))), LIMITS)
    assert server.serve(requests) == wanted


def plan_of(step: int, row: Row, *inits: SlotInit) -> StepPlan:
    return StepPlan(1, step, (row,), inits)


@pytest.mark.parametrize(
    "row",
    [
        Row(0, 5, 1, RowOutput.SAMPLE, (), 3),  # two blocks of four positions
        Row(0, 5, 1, RowOutput.NONE, (), 1),
        Row(0, 5, 1, RowOutput.SAMPLE, (), -1),
        Row(0, 7, 1, RowOutput.SAMPLE, (), 1),
    ],
    ids=["without-a-block", "without-a-sample", "fewer-than-none", "behind-an-unknown-position"],
)
def test_row_with_drafts_that_contradicts_the_tables_is_refused(row: Row) -> None:
    runner = runner_of(tiny_model("llama"))
    first = Row(0, 0, 5, RowOutput.SAMPLE, (3, 4))
    runner.launch(plan_of(1, first, SlotInit(0, (5, 6, 7, 8, 9), 5, (), Sampling())))
    with pytest.raises(StepFailed):
        runner.launch(plan_of(2, row))


def test_position_behind_rejected_drafts_is_accepted_and_one_beyond_is_not() -> None:
    """After a row with two drafts the worker does not know which row comes: 1 to 3 positions further."""
    for start, is_valid in ((5, False), (6, True), (7, True), (8, True), (9, False)):
        runner = runner_of(tiny_model("llama"), drafter=FixedDrafts((40, 41)))
        first = Row(0, 0, 5, RowOutput.SAMPLE, (3, 4, 5))
        runner.launch(plan_of(1, first, SlotInit(0, (5, 6, 7, 8, 9), 5, (), Sampling())))
        runner.launch(plan_of(2, Row(0, 5, 1, RowOutput.SAMPLE, (), 2)))
        following = plan_of(3, Row(0, start, 1, RowOutput.SAMPLE))
        if is_valid:
            assert len(runner.launch(following).result().tokens) == 1
        else:
            with pytest.raises(StepFailed):
                runner.launch(following)


def test_answer_that_runs_out_of_tokens_fails_as_without_drafts() -> None:
    """Three tokens are allowed, each once. The position behind them has a draft, too."""
    request = repeating(1, allowed_ids=(30, 31, 32), no_repeat_ngram_size=1)
    ends = []
    for drafts, most in (((), 0), ((30, 31, 32, 30, 31), 5), ((31, 30, 32, 30, 31), 5), ((32, 31, 30), 5)):
        server = InProcess(runner_of(tiny_model("llama"), drafter=FixedDrafts(tuple(drafts))), LIMITS)
        with pytest.raises(Failure):
            server.serve([replace(request, max_drafts=most)])
        tokens = [token for e in server.events if isinstance(e, TokensReady) for token in e.tokens]
        ends.append((tokens, [type(e.error).__name__ for e in server.events if isinstance(e, Failed)]))
    assert ends == ends[:1] * 4
    assert ends[0] == (ends[0][0], ["NoTokenAllowed"])
    assert len(ends[0][0]) == 3
