"""Finished answers are valid by an independent validator, for schemas of many kinds."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import pytest
from llguidance import LLMatcher
from support.families import WIDE, tiny_model
from support.inprocess import InProcess
from support.schemas import schemas
from support.service import DEMO_MODEL

from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.text.detokenizer import decode
from lineclear.scheduler.text.grammar_process import grammar_of
from lineclear.scheduler.text.tokenizer import load_tokenizer
from lineclear.wire.messages import Sampling
from lineclear.worker.model.loader import build_fused, wrap_model
from lineclear.worker.model_runner import ModelRunner, RunnerOptions

TOKENIZER = load_tokenizer(DEMO_MODEL)
EOS = 2


@pytest.mark.parametrize("any_whitespace", [False, True])
def test_finished_answers_are_valid(any_whitespace: bool) -> None:
    """A model of random weights chooses any allowed token, which is the hardest case."""
    fused = build_fused(wrap_model(tiny_model("llama", **{**WIDE, "vocab_size": 4096})))
    assert fused is not None
    loaded = replace(fused, directory=DEMO_MODEL)
    runner = ModelRunner(loaded, RunnerOptions(num_blocks=1024, block_size=16, num_slots=32, max_step_tokens=256))
    chosen = schemas()
    assert len(chosen) == 300
    requests = []
    for number, schema in enumerate(chosen):
        grammar = grammar_of("json_schema", json.dumps(schema), any_whitespace=any_whitespace)
        assert not LLMatcher.validate_grammar(grammar).startswith("ERROR"), schema
        sampling = Sampling(temperature=1.0, seed=number, stop_ids=(EOS,), grammar=grammar)
        requests.append(Request(str(number), tuple(range(9, 20)), sampling, max_tokens=96, eos_ids=frozenset({EOS})))
    server = InProcess(runner, CoreLimits(max_batch_size=32, target_batch_tokens=256))
    answers = server.serve(requests)
    finished = 0
    for number, schema in enumerate(chosen):
        output = answers[str(number)]
        if output[-1] == EOS:
            finished += 1
            text = decode(TOKENIZER, output[:-1], keep_special=False)
            jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)
    print(f"{finished} of {len(chosen)} answers finished")
    assert finished > 200
