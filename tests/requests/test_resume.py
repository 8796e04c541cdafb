"""Resume an interrupted answer at every index: same tokens and text, and nothing is sent twice."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from support.answers import answered, invalid_fields
from support.serving import EOS, HELLO, TOKENIZER, Serving, text_of, text_request, tokens_of

from lineclear.scheduler.text.detokenizer import AnswerText
from lineclear.scheduler.text.stop_regex import StopRegex
from lineclear.scheduler.text.stop_strings import StopStrings
from lineclear.v1 import inference_pb2 as pb

MODEL = {"model_fingerprint": HELLO.model_fingerprint}
IDS = TOKENIZER.encode_sealed("Héllo 😀, how are you? STOP here")


class Case(NamedTuple):
    """An answer to resume: `request` are fields of the message, `text` the same as options of AnswerText."""

    name: str
    answer: list[int]
    request: Mapping[str, Any] = MappingProxyType({})
    text: Mapping[str, Any] = MappingProxyType({})


CASES = [
    Case("plain", IDS),
    Case("end of sequence", [*IDS, EOS]),
    Case("stop token", [*IDS[:9], 7], {"stop": {"token_ids": [7]}}, {"silent_ids": frozenset({7, EOS})}),
    Case(
        "own end of sequence",
        [*IDS[:9], EOS, 7],
        {"stop": {"eos_token_ids": [7]}, "sampling": {"min_tokens": 3}},
        {"silent_ids": frozenset({7})},
    ),
    Case("stop string", IDS, {"stop": {"strings": ["STOP"]}}, {"stops": StopStrings(["STOP"])}),
    Case(
        "kept stop string",
        IDS,
        {"stop": {"strings": ["o 😀", "you? S"], "include_stop_string": True}},
        {"stops": StopStrings(["o 😀", "you? S"]), "include_stop_string": True},
    ),
    Case(
        "stop string after a minimum",
        IDS,
        {"stop": {"strings": ["o", "are"]}, "sampling": {"min_tokens": 16, "seed": 5}},
        {"stops": StopStrings(["o", "are"]), "min_tokens": 16},
    ),
    Case("stop regex", IDS, {"stop": {"regex": "o+[a-z] +h"}}, {"stops": StopRegex("o+[a-z] +h")}),
    Case("stop regex of one word", IDS, {"stop": {"regex": "S[A-Z]+"}}, {"stops": StopRegex("S[A-Z]+")}),
    Case("beginning of a stop string", IDS, {"stop": {"strings": ["here and"]}}, {"stops": StopStrings(["here and"])}),
    Case("unfinished character", TOKENIZER.encode_sealed("ab é")[:-1]),
]


def resume_request(case: Case, received: list[int] | None = None) -> pb.GenerateRequest:
    request = text_request(**case.request)
    request.sampling.max_tokens = len(case.answer)
    request.sampling.seed = 5
    if received is not None:
        request.resume.token_ids.extend(received)
        request.resume.model_fingerprint = HELLO.model_fingerprint
    return request


def released(case: Case, received: list[int]) -> str:
    """Return the text that was sent with the received tokens."""
    text = AnswerText(TOKENIZER, **{"silent_ids": frozenset({EOS}), **case.text})
    return "".join(text.push(token) for token in received)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_resume_at_every_index_gives_the_same_rest(s: Serving, case: Case) -> None:
    whole = await answered(s, case.answer, resume_request(case))
    tokens, text = tokens_of(whole), text_of(whole)
    assert tokens == case.answer[: len(tokens)]
    for have in range(len(tokens) + 1):
        received = tokens[:have]
        rest = await remaining(s.generate(resume_request(case, received)))
        assert received + tokens_of(rest) == tokens
        assert released(case, received) + text_of(rest) == text
        assert all(r.first_index >= have for r in rest)
        assert [r.first_index for r in rest if r.token_ids][:1] == ([have] if have < len(tokens) else [])
        assert rest[0].started.prompt_tokens == whole[0].started.prompt_tokens
        assert rest[0].started.seed == 5
        for name in ("finish_reason", "matched_stop_string", "matched_token_id"):
            assert getattr(rest[-1].finished, name) == getattr(whole[-1].finished, name)
        assert rest[-1].finished.usage.completion_tokens == len(tokens)


async def remaining(call: Any) -> list[pb.GenerateResponse]:
    return [response async for response in call]


async def test_answer_without_end_needs_no_step(s: Serving) -> None:
    for case, reason in (
        (CASES[0], pb.FINISH_REASON_LENGTH),
        (CASES[1], pb.FINISH_REASON_STOP_EOS),
        (CASES[2], pb.FINISH_REASON_STOP_TOKEN),
    ):
        (only,) = await remaining(s.generate(resume_request(case, case.answer)))
        assert only.finished.finish_reason == reason
        assert not only.token_ids
    assert s.engine.submitted == []


async def test_engine_gets_the_received_tokens(s: Serving) -> None:
    s.engine.answer = lambda request: IDS
    await remaining(s.generate(resume_request(CASES[0], IDS[:3])))
    (request,) = s.engine.submitted
    assert (request.output, request.sampling.seed, request.max_tokens) == (tuple(IDS[:3]), 5, len(IDS))


IMPOSSIBLE: dict[str, tuple[list[int], dict[str, Any], str]] = {
    "no seed": ([5], {"sampling": {"temperature": 0.5}}, "sampling.seed"),
    "beyond the vocabulary": ([512], {}, "resume.token_ids[0]"),
    "after the end": ([5, EOS, 6], {}, "resume.token_ids"),
    "too many": ([5] * 4, {"sampling": {"seed": 1, "max_tokens": 3}}, "resume.token_ids"),
    "beyond the context": ([5] * 129, {}, "resume.token_ids"),
    "after a stop string": (IDS, {"stop": {"strings": ["how"]}}, "resume.token_ids"),
}


@pytest.mark.parametrize(("received", "fields", "field"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
async def test_impossible_resume_is_rejected(
    s: Serving, received: list[int], fields: dict[str, Any], field: str
) -> None:
    request = text_request(**{"sampling": {"seed": 1}, **fields}, resume={**MODEL, "token_ids": received})
    assert set(await invalid_fields(s.generate(request))) == {field}
    assert s.engine.submitted == []


async def test_greedy_needs_no_seed(s: Serving) -> None:
    request = text_request(resume={**MODEL, "token_ids": IDS[:2]}, sampling={"temperature": 0.0})
    assert tokens_of(await answered(s, IDS, request, 2)) == IDS[2:]
