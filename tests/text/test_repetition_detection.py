"""Answers that repeat themselves end with a reason of their own, at the same token on every server."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.answers import answered, invalid_fields
from support.serving import HELLO, TOKENIZER, Serving, text_of, text_request, tokens_of

from lineclear.scheduler.text.detokenizer import decode
from lineclear.scheduler.text.stop_strings import RepetitionDetector, RepetitionLimits
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


@settings(deadline=None, max_examples=150)
@given(tokens=st.lists(st.integers(0, 2), max_size=40), limits=limits)
def test_detector_equals_vllm_at_every_token(tokens: list[int], limits: RepetitionLimits) -> None:
    detector = RepetitionDetector(limits)
    found = [detector.push(token_id) for token_id in tokens]
    assert found == [by_vllm(tokens[: end + 1], limits) for end in range(len(tokens))]


IDS = TOKENIZER.encode("The quick brown fox")
LOOP = [IDS[0], *IDS[1:4] * 5]
DETECT = {"repetition_detection": {"max_pattern_size": 5, "min_count": 3}}


@pytest.mark.parametrize("min_tokens", [0, 12])
@pytest.mark.parametrize("omit_text", [False, True])
async def test_repetition_ends_the_answer(s: Serving, min_tokens: int, omit_text: bool) -> None:
    sampling, output = {"min_tokens": min_tokens, "max_tokens": 50}, {"omit_text": omit_text}
    responses = await answered(s, LOOP, text_request(stop=DETECT, sampling=sampling, output=output))
    finished = responses[-1].finished
    length = max(1 + 9, min_tokens)
    assert finished.finish_reason == pb.FINISH_REASON_REPETITION
    assert finished.usage.completion_tokens == length
    assert tokens_of(responses) == LOOP[:length]
    assert text_of(responses) == ("" if omit_text else decode(TOKENIZER, LOOP[:length], keep_special=False))
    assert not finished.HasField("matched_stop_string")


async def test_text_held_back_for_a_stop_string_is_sent(s: Serving) -> None:
    whole = decode(TOKENIZER, LOOP[:10], keep_special=False)
    responses = await answered(s, LOOP, text_request(stop={**DETECT, "strings": [whole[-2:] + "?"]}))
    assert responses[-1].finished.finish_reason == pb.FINISH_REASON_REPETITION
    assert text_of(responses) == whole


async def test_stop_string_of_the_same_token_wins(s: Serving) -> None:
    whole = decode(TOKENIZER, LOOP[:10], keep_special=False)
    stop = {**DETECT, "strings": [whole[len(decode(TOKENIZER, LOOP[:8], keep_special=False)) :]]}
    responses = await answered(s, LOOP[:1] + LOOP[8:10], text_request(stop=stop))
    assert responses[-1].finished.matched_stop_string


def resumed(cut: int) -> pb.GenerateRequest:
    resume = {"token_ids": LOOP[:cut], "model_fingerprint": HELLO.model_fingerprint}
    return text_request(stop=DETECT, resume=resume, sampling={"temperature": 0.0, "max_tokens": 50})


@pytest.mark.parametrize("cut", [1, 5, 9, 10])
async def test_resumed_answer_ends_at_the_same_token(s: Serving, cut: int) -> None:
    responses = await answered(s, LOOP, resumed(cut), cut)
    assert tokens_of(responses) == LOOP[cut:10]
    assert responses[-1].finished.finish_reason == pb.FINISH_REASON_REPETITION


async def test_resume_behind_the_repetition_is_rejected(s: Serving) -> None:
    assert await invalid_fields(s.generate(resumed(11))) == ["resume.token_ids"]
