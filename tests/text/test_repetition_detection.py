"""Answers that repeat themselves end with a reason of their own, at the same token on every server."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.serving import HELLO, TOKENIZER, Serving, error_of, read_all, serving, text_of, text_request, tokens_of

from lineclear.scheduler.text.detokenizer import decode
from lineclear.scheduler.text.repetition import RepetitionDetector, RepetitionLimits
from lineclear.v1 import inference_pb2 as pb

limits = st.builds(
    lambda least, more, count: RepetitionLimits(least + more, least, count),
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(2, 4),
)


def by_vllm(tokens: list[int], found: RepetitionLimits) -> bool:
    """Follow vLLM's check_sequence_repetition."""
    for size in range(found.min_pattern_size, found.max_pattern_size + 1):
        if size * found.min_count > len(tokens):
            return False
        if all(
            tokens[-(size * repeat + place)] == tokens[-place]
            for place in range(1, size + 1)
            for repeat in range(1, found.min_count)
        ):
            return True
    return False


@settings(deadline=None, max_examples=400)
@given(tokens=st.lists(st.integers(0, 2), max_size=40), limits=limits)
def test_detector_equals_vllm_at_every_token(tokens: list[int], limits: RepetitionLimits) -> None:
    detector = RepetitionDetector(limits)
    found = [detector.push(token_id) for token_id in tokens]
    assert found == [by_vllm(tokens[: end + 1], limits) for end in range(len(tokens))]


IDS = TOKENIZER.encode("The quick brown fox")
LOOP = [IDS[0], *IDS[1:4] * 5]
DETECT = {"repetition_detection": {"max_pattern_size": 5, "min_count": 3}}


@pytest.mark.parametrize("min_tokens", [0, 12])
async def test_repetition_ends_the_answer(s: Serving, min_tokens: int) -> None:
    s.engine.answer = lambda request: LOOP
    request = text_request(stop=DETECT, sampling={"min_tokens": min_tokens, "max_tokens": 50})
    responses = await read_all(s.generate(request))
    finished = responses[-1].finished
    length = max(1 + 9, min_tokens)
    assert finished.finish_reason == pb.FINISH_REASON_REPETITION
    assert finished.usage.completion_tokens == length
    assert tokens_of(responses) == LOOP[:length]
    assert text_of(responses) == decode(TOKENIZER, LOOP[:length], keep_special=False)
    assert not finished.HasField("matched_stop_string")


async def test_repetition_ends_an_answer_without_text(s: Serving) -> None:
    s.engine.answer = lambda request: LOOP
    responses = await read_all(s.generate(text_request(stop=DETECT, output={"omit_text": True})))
    assert responses[-1].finished.finish_reason == pb.FINISH_REASON_REPETITION
    assert (tokens_of(responses), text_of(responses)) == (LOOP[:10], "")


async def test_text_held_back_for_a_stop_string_is_sent(tmp_path: Path) -> None:
    whole = decode(TOKENIZER, LOOP[:10], keep_special=False)
    async with serving(tmp_path) as s:
        s.engine.answer = lambda request: LOOP
        responses = await read_all(s.generate(text_request(stop={**DETECT, "strings": [whole[-2:] + "?"]})))
        assert responses[-1].finished.finish_reason == pb.FINISH_REASON_REPETITION
        assert text_of(responses) == whole


async def test_stop_string_of_the_same_token_wins(tmp_path: Path) -> None:
    whole = decode(TOKENIZER, LOOP[:10], keep_special=False)
    stop = {**DETECT, "strings": [whole[len(decode(TOKENIZER, LOOP[:8], keep_special=False)) :]]}
    async with serving(tmp_path) as s:
        s.engine.answer = lambda request: LOOP[:1] + LOOP[8:10]
        assert (await read_all(s.generate(text_request(stop=stop))))[-1].finished.matched_stop_string


@pytest.mark.parametrize("cut", [1, 5, 9, 10])
async def test_resumed_answer_ends_at_the_same_token(s: Serving, cut: int) -> None:
    s.engine.answer = lambda request: LOOP
    resume = {"token_ids": LOOP[:cut], "model_fingerprint": HELLO.model_fingerprint}
    request = text_request(stop=DETECT, resume=resume, sampling={"temperature": 0.0, "max_tokens": 50})
    responses = await read_all(s.generate(request), cut)
    assert tokens_of(responses) == LOOP[cut:10]
    assert responses[-1].finished.finish_reason == pb.FINISH_REASON_REPETITION


async def test_resume_behind_the_repetition_is_rejected(s: Serving) -> None:
    resume = {"token_ids": LOOP[:11], "model_fingerprint": HELLO.model_fingerprint}
    error = await error_of(s.generate(text_request(stop=DETECT, resume=resume, sampling={"temperature": 0.0})))
    assert [violation.field for violation in error.violations] == ["resume.token_ids"]
