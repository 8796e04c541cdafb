"""Structured output through scheduler and worker: valid, and the same tokens whatever is scheduled.

A model of random weights chooses any allowed token, which is the hardest case.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher
from support.families import WIDE, tiny_model
from support.inprocess import Failure, InProcess
from support.mask_threads import LateThreads
from support.schemas import schemas
from support.service import DEMO_MODEL

from lineclear.errors import NoTokenAllowed
from lineclear.scheduler.core.events import Finished
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.text.detokenizer import decode
from lineclear.scheduler.text.schema_to_grammar import grammar_of
from lineclear.scheduler.text.tokenizer import load_tokenizer
from lineclear.wire.messages import Row, Sampling
from lineclear.worker.drafts.verification import Drafts, ReadTokens
from lineclear.worker.model.loaded_model import LoadedModel
from lineclear.worker.model.loader import build_fused, wrap_model
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions
from lineclear.worker.structured_output import grammar_constraints

TOKENIZER = load_tokenizer(DEMO_MODEL)
EOS = frozenset({2})
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["a", "bcd", "é"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), overrides={"whitespace_flexible": False}),
    "regex": LLMatcher.grammar_from_regex("[a-f]{10,30}x"),
    "lark": LLMatcher.grammar_from_lark('start: "(" start ")" | /[0-9]{4}/'),
    "": "",
}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """Return a random model with the vocabulary of the demo model."""
    fused = build_fused(wrap_model(tiny_model("llama", **{**WIDE, "vocab_size": 4096})))
    assert fused is not None
    return replace(fused, directory=DEMO_MODEL)


def server(loaded: LoadedModel, num_blocks: int = 256, **limits: Any) -> InProcess:
    sizes = {"num_blocks": num_blocks, "block_size": 4, "num_slots": 8, "max_step_tokens": 128}
    runner = ModelRunner(loaded, RunnerOptions(**sizes))
    return InProcess(runner, CoreLimits(max_batch_size=8, target_batch_tokens=64, **limits))


def asked(name: str, grammar: str, seed: int, **sampling: Any) -> Request:
    parameters = Sampling(temperature=1.0, seed=seed, stop_ids=(2,), grammar=grammar, **sampling)
    return Request(name, tuple(range(20 + seed, 32 + seed)), parameters, max_tokens=48, eos_ids=EOS)


def requests() -> list[Request]:
    return [asked(f"{name}{seed}", grammar, seed) for seed in range(2) for name, grammar in GRAMMARS.items()]


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> dict[str, list[int]]:
    """Return the answers to all requests, which run together."""
    return server(loaded).serve(requests())


def test_tokens_do_not_depend_on_scheduling(loaded: LoadedModel, expected: dict[str, list[int]]) -> None:
    single, alone = server(loaded), dict[str, list[int]]()
    for request in requests():
        alone |= single.serve([request])
    for name, output in alone.items():
        if name.startswith("schema") and output[-1] == 2:
            jsonschema.validate(json.loads(decode(TOKENIZER, output[:-1], keep_special=False)), SCHEMA)
    assert expected == alone
    assert server(loaded, pipeline_depth=1).serve(requests()) == alone
    assert server(loaded).serve(requests(), lose_worker_after_steps=9) == alone
    short = server(loaded, num_blocks=28)
    assert short.serve(requests()) == alone
    assert short.counters.preemptions > 0


@pytest.mark.parametrize("limits", [{"pipeline_depth": 1}, {"pipeline_depth": 3}], ids=str)
def test_tokens_do_not_depend_on_late_masks(
    loaded: LoadedModel, expected: dict[str, list[int]], limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows whose mask is late are planned again. Half of the masks are late, up to three times."""
    monkeypatch.setattr(grammar_constraints, "MaskThreads", lambda: LateThreads(500))
    late = server(loaded, **limits)
    assert late.serve(requests()) == expected
    assert late.counters.wasted_samples > 50
    assert late.counters.generation_tokens == sum(map(len, expected.values()))


@pytest.mark.parametrize("family", ["granitemoehybrid", "lfm2"])
def test_late_masks_beside_recurrent_state(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states before deferred and void rows are brought back, and no sequence starts again."""
    hybrid = replace(wrap_model(tiny_model(family, vocab_size=4096)), directory=DEMO_MODEL)
    expected = server(hybrid).serve(requests())
    monkeypatch.setattr(grammar_constraints, "MaskThreads", lambda: LateThreads(500))
    late = server(hybrid, pipeline_depth=3)
    assert late.serve(requests()) == expected
    assert late.counters.wasted_samples > 50
    assert late.counters.preemptions == 0


def test_resumed_answer_continues(loaded: LoadedModel) -> None:
    request = asked("a", GRAMMARS["schema"], 5)
    single = server(loaded)
    whole = single.serve([request])["a"]
    for received in (1, 7, len(whole) - 1):
        resumed = replace(request, output=tuple(whole[:received]))
        assert single.serve([resumed])["a"] == whole[received:]


@pytest.mark.parametrize(
    "sampling", [{"min_tokens": 20}, {"banned_ids": tuple(range(4096))}], ids=["min_tokens", "banned"]
)
def test_request_without_an_allowed_token_fails_alone(loaded: LoadedModel, sampling: dict[str, Any]) -> None:
    both = server(loaded)
    with pytest.raises(Failure) as failure:
        both.serve([asked("bad", LLMatcher.grammar_from_regex("yes"), 1, **sampling), *requests()])
    assert isinstance(failure.value.args[0], NoTokenAllowed)
    assert both.finished("schema0")


class LastToken:
    """A drafter of the last token, again and again."""

    def reset(self) -> None:
        pass

    def forget(self, slot: int) -> None:
        pass

    def propose(self, rows: Iterable[Row], read_tokens: ReadTokens) -> Drafts:
        return {row.slot: read_tokens(row.slot, row.start, row.start + 1) * row.num_drafts for row in rows}


def test_drafts_beside_constrained_rows(loaded: LoadedModel, expected: dict[str, list[int]]) -> None:
    """Requests without a form verify drafts in the same steps; constrained ones decode plainly."""
    repeating = [
        Request(f"repeats{i}", (*range(30 + i, 36 + i),) * 3, Sampling(seed=i), max_tokens=40, max_drafts=4)
        for i in range(3)
    ]
    wanted = server(loaded).serve([replace(request, max_drafts=0) for request in repeating]) | expected
    runner = ModelRunner(loaded, RunnerOptions(num_blocks=256, block_size=4, num_slots=8), drafter=LastToken())
    both = InProcess(runner, CoreLimits(max_batch_size=8, adaptive_drafts=False))
    constrained = [replace(request, max_drafts=4) for request in requests()]
    assert both.serve([*constrained[:5], *repeating, *constrained[5:]]) == wanted
    stats = {e.request_id: e.stats for e in both.events if isinstance(e, Finished)}
    assert all(stats[request.request_id].drafted_tokens > 0 for request in repeating)
    assert all(stats[x.request_id].drafted_tokens == 0 for x in constrained if x.sampling.grammar)


@pytest.mark.parametrize("any_whitespace", [False, True])
def test_finished_answers_are_valid(loaded: LoadedModel, any_whitespace: bool) -> None:
    """By an independent validator, for every second of 300 schemas of many kinds."""
    chosen = schemas()[any_whitespace::2]
    asked = []
    for number, schema in enumerate(chosen):
        grammar = grammar_of("json_schema", json.dumps(schema), any_whitespace=any_whitespace)
        assert not LLMatcher.validate_grammar(grammar).startswith("ERROR"), schema
        sampling = Sampling(temperature=1.0, seed=number, stop_ids=(2,), grammar=grammar)
        asked.append(Request(str(number), tuple(range(9, 20)), sampling, max_tokens=96, eos_ids=EOS))
    runner = ModelRunner(loaded, RunnerOptions(num_blocks=1024, block_size=16, num_slots=32, max_step_tokens=256))
    answers = InProcess(runner, CoreLimits(max_batch_size=32, target_batch_tokens=256)).serve(asked)
    finished = [number for number in range(len(chosen)) if answers[str(number)][-1] in EOS]
    for number in finished:
        text = decode(TOKENIZER, answers[str(number)][:-1], keep_special=False)
        jsonschema.validate(json.loads(text), chosen[number], cls=jsonschema.Draft202012Validator)
    assert len(finished) > 100
