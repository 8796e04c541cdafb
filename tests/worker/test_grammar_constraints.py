"""Grammars allow the right tokens, also for a slot that starts in the middle of an answer."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from support.mask_threads import PromptThreads
from support.service import DEMO_MODEL
from support.small_tokenizers import byte_level, save

from lineclear.scheduler.text.detokenizer import decode
from lineclear.scheduler.text.tokenizer import load_tokenizer
from lineclear.wire.messages import Sampling, SlotInit
from lineclear.worker.sampling.logits import with_argmax
from lineclear.worker.sampling.sampler import apply_masks, sample
from lineclear.worker.sampling.sampling_metadata import SamplingTable
from lineclear.worker.structured_output.grammar_compiler import GrammarCompiler
from lineclear.worker.structured_output.grammar_constraints import ConstraintTable, Masks

VOCABULARY, EOS = 4096, 2
TOKENIZER = load_tokenizer(DEMO_MODEL)
PROMPT = (5, 300, 301)
SCHEMA = LLMatcher.grammar_from_json_schema(
    json.dumps(
        {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
            "required": ["name", "n"],
            "additionalProperties": False,
        }
    ),
    overrides={"whitespace_flexible": False},
)
YES_NO = LLMatcher.grammar_from_regex("yes|no")


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(DEMO_MODEL, VOCABULARY, (EOS,))


def ids(masks: Masks, row: int = 0) -> set[int]:
    bits = np.unpackbits(masks.bits[row].view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


class Slot:
    """One slot of a table, driven step by step."""

    def __init__(self, compiler: GrammarCompiler, output: Sequence[int] = (), **sampling: object) -> None:
        self.table = ConstraintTable(compiler, VOCABULARY, PromptThreads())
        self.tokens = [*PROMPT, *output]
        parameters = Sampling(**{"stop_ids": (EOS,), **sampling})  # type: ignore[arg-type]
        self.table.set_slot(SlotInit(3, tuple(self.tokens), len(PROMPT), (), parameters))

    def allowed(self) -> set[int]:
        """Return the tokens allowed next, in the second of two rows."""
        future = self.table.start([1, 3], [9, len(self.tokens)], lambda rows: lambda: [self.tokens[-1] for _ in rows])
        assert future is not None
        masks = future.result()
        assert masks.rows == [1]
        return ids(masks)

    def say(self, text: str) -> None:
        for token in TOKENIZER.encode_sealed(text):
            self.allowed()
            self.tokens.append(token)


def random_output(compiler: GrammarCompiler, seed: int, count: int) -> list[int]:
    slot, chooser = Slot(compiler, grammar=SCHEMA), random.Random(seed)
    while len(slot.tokens) < len(PROMPT) + count and slot.tokens[-1] != EOS:
        slot.tokens.append(chooser.choice(sorted(slot.allowed())))
    return slot.tokens[len(PROMPT) :]


def test_answers_are_valid(compiler: GrammarCompiler) -> None:
    num_finished = 0
    for seed in range(8):
        output = random_output(compiler, seed, 60)
        if output[-1] == EOS:
            num_finished += 1
            answer = json.loads(decode(TOKENIZER, output[:-1], keep_special=False))
            assert set(answer) == {"name", "n"}
            assert isinstance(answer["n"], int)
    assert num_finished > 1


def test_slot_that_starts_within_an_answer_allows_the_same_tokens(compiler: GrammarCompiler) -> None:
    output = random_output(compiler, 1, 30)
    whole = Slot(compiler, grammar=SCHEMA)
    for index, token in enumerate(output):
        allowed = whole.allowed()
        assert allowed == Slot(compiler, output[:index], grammar=SCHEMA).allowed(), index
        assert token in allowed
        whole.tokens.append(token)


def test_end_is_allowed_exactly_where_the_grammar_may_end(compiler: GrammarCompiler) -> None:
    slot = Slot(compiler, grammar=YES_NO)
    assert EOS not in slot.allowed()
    slot.say("yes")
    assert slot.allowed() == {EOS}


def test_end_tokens_of_the_request_replace_the_model_s(compiler: GrammarCompiler) -> None:
    slot = Slot(compiler, grammar=YES_NO, stop_ids=(77, 78))
    assert not slot.allowed() & {EOS, 77, 78}
    slot.say("no")
    assert slot.allowed() == {77, 78}


def test_no_end_before_min_tokens(compiler: GrammarCompiler) -> None:
    slot = Slot(compiler, grammar=LLMatcher.grammar_from_regex("a{1,9}"), min_tokens=3)
    for count in range(5):
        assert (EOS in slot.allowed()) == (count >= 3), count
        slot.say("a")


def test_no_token_is_allowed_after_an_output_that_does_not_match(compiler: GrammarCompiler) -> None:
    assert Slot(compiler, TOKENIZER.encode_sealed("maybe"), grammar=YES_NO).allowed() == set()


def test_grammar_that_does_not_compile_allows_no_token(compiler: GrammarCompiler) -> None:
    assert Slot(compiler, grammar="start: (").allowed() == set()


AMBIGUOUS = LLMatcher.grammar_from_lark('start: "x" a\na: a a | a a a | a a a a | /[a-z ]/')
MANY_EXPRESSIONS = LLMatcher.grammar_from_lark(
    "\n".join(
        ["start: (" + " | ".join(f"T{i}" for i in range(100)) + ")+"]
        + [f"T{i}: /[a-z ]*{chr(97 + i % 26)}[a-z]{{{i % 7},{i % 7 + 3}}}{chr(97 + i // 26)}/" for i in range(100)]
    )
)


@pytest.mark.parametrize("grammar", [AMBIGUOUS, MANY_EXPRESSIONS], ids=["ambiguous", "many expressions"])
def test_work_of_one_mask_is_bounded(compiler: GrammarCompiler, grammar: str) -> None:
    """Unbounded, each token of the answer adds to the work of the next mask, up to seconds."""
    letters = {compiler.token_bytes(token): token for token in range(VOCABULARY)}
    slot = Slot(compiler, [letters[b"x"], *[letters[b"a"]] * 12], grammar=grammar)
    assert slot.allowed() == set()
    assert Slot(compiler, grammar=SCHEMA).allowed(), "other grammars are not affected"


def test_grammar_holds_behind_its_start(compiler: GrammarCompiler) -> None:
    slot = Slot(compiler, grammar=YES_NO, grammar_start="done.")
    assert slot.allowed() == set(range(VOCABULARY)) - {EOS}
    slot.say("I am not done")
    assert slot.allowed() == set(range(VOCABULARY)) - {EOS}
    slot.say(".")
    assert slot.allowed() == Slot(compiler, grammar=YES_NO).allowed()
    assert slot.allowed() == Slot(compiler, slot.tokens[len(PROMPT) :], grammar=YES_NO, grammar_start="done.").allowed()


@pytest.mark.parametrize("is_token", [True, False], ids=["a special token", "text"])
def test_grammar_holds_behind_a_marker_that_is_a_token(tmp_path: Path, is_token: bool) -> None:
    """As `</think>` of models that reason; other models write it as text."""
    library = byte_level()
    compiler = GrammarCompiler(save(tmp_path / "model", library), library.get_vocab_size(), (1,))
    marker = [library.token_to_id("</think>")] if is_token else library.encode("</th", add_special_tokens=False).ids
    text = [] if is_token else library.encode("ink>", add_special_tokens=False).ids
    thought = library.encode("hm, yes", add_special_tokens=False).ids
    table = ConstraintTable(compiler, library.get_vocab_size(), PromptThreads())
    output = [*thought, *marker, *text]
    starts = []
    for count in range(len(output) + 1):
        sampling = Sampling(grammar=YES_NO, grammar_start="</think>", stop_ids=(1,))
        table.set_slot(SlotInit(0, (5, *output[:count]), 1, (), sampling))
        masks = table.start([0], [count + 1], lambda rows: list)
        assert masks is not None
        allowed = {compiler.token_bytes(token)[:1] for token in ids(masks.result())}
        starts.append(allowed == {b"y", b"n"})
    assert starts == [False] * len(output) + [True]


def test_next_owner_of_a_slot_is_not_constrained(compiler: GrammarCompiler) -> None:
    slot = Slot(compiler, grammar=YES_NO)
    slot.table.set_slot(SlotInit(3, PROMPT, len(PROMPT), (), Sampling()))
    assert slot.table.start([3], [3], lambda rows: list) is None


def test_masks_change_the_constrained_rows_only() -> None:
    values = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))
    bits = np.zeros((2, 3), np.uint32)
    bits[0, 1], bits[1, 2] = 0b101, 1 << 31
    masked = apply_masks(with_argmax(values.clone()), Masks([0, 2], bits))
    assert [row.isfinite().nonzero()[:, 0].tolist() for row in masked.values] == [[32, 34], list(range(96)), [95]]
    assert torch.equal(masked.values[1], values[1])
    assert masked.max_ids.tolist() == [32 + 2 * int(values[0, 34] > values[0, 32]), int(values[1].argmax()), 95]
    assert masked.host_max is not None
    assert masked.host_max[1] == masked.max_ids.tolist()


def test_mask_does_not_hide_a_value_that_is_not_finite() -> None:
    values = torch.zeros(2, 96)
    values[0, 50] = float("nan")
    masks = Masks([0, 1], np.full((2, 3), 1, np.uint32))
    table = SamplingTable(2, 96, torch.device("cpu"))
    for slot in range(2):
        table.set_slot(slot, Sampling())
    rows = table.select([0, 1], [1, 1], np.ones(2, np.int64))
    found = sample(with_argmax(values), rows, torch.zeros(2, 4, dtype=torch.int64), masks)
    assert found.bad is not None
    assert found.bad.tolist() == [True, False]
