"""Every bound of the schema, from both sides."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.bad_requests import CASES, CONTEXT, MAX_BYTES, MAX_OUTPUTS, VOCABULARY, Bad, request
from support.serving import EOS, error_of, read_all, serving

from lineclear.errors import InvalidRequest, PromptTooLong, TokenOutOfVocabulary
from lineclear.scheduler.requests.validate.request import (
    ModelBounds,
    check,
    check_detokenize,
    check_token_ids,
    check_tokenize,
    resolve,
)
from lineclear.scheduler.requests.validate.sampling import DEFAULTS, RANGES, model_defaults
from lineclear.scheduler.requests.validate.violations import Violations, checked_texts
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import sampling_pb2
from lineclear.wire.codec import decode, encode
from lineclear.wire.messages import Row, SlotInit, StepPlan

BOUNDS = ModelBounds(
    context_length=CONTEXT,
    vocab_size=VOCABULARY,
    settings=SchedulerSettings(
        max_prompt_bytes=MAX_BYTES, default_max_tokens=16, max_outputs=MAX_OUTPUTS, max_chat_messages=4
    ),
    step_tokens=256,
    eos_ids=frozenset({EOS}),
)
PROTOS = Path(__file__).parents[2] / "protos" / "lineclear" / "v1"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_invalid_request_names_reason_and_fields(case: Bad) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(case.request, BOUNDS)
    assert caught.value.reason == case.reason
    assert {v.field for v in caught.value.violations} == set(case.fields)
    # A sentence names the limit and never the value; sizes are not values.
    text = str(caught.value) + "".join(v.description for v in caught.value.violations)
    for value in ("9999", "nan", "inf", "1e+30", "4294967295", "a/b", "a b", "xxxx", "im_start", "😀"):
        assert value not in text


async def test_invalid_requests_do_not_reach_the_engine(tmp_path: Path) -> None:
    async with serving(tmp_path, max_prompt_bytes=MAX_BYTES, max_outputs=MAX_OUTPUTS) as s:
        for case in CASES:
            error = await error_of(s.generate(case.request))
            assert (error.code, error.reason) == ("INVALID_ARGUMENT", case.reason), case.name
            assert {v.field for v in error.violations} == set(case.fields)
            assert error.retry_after_seconds is None
        assert s.engine.submitted == []
        s.engine.answer = lambda request: []
        await read_all(s.generate())


async def test_many_violations_fit_the_trailer(tmp_path: Path) -> None:
    many = [sampling_pb2.LogitBias(token_id=2**32 - 1, bias=1e9) for _ in range(300)]
    async with serving(tmp_path) as s:
        error = await error_of(s.generate(request(sampling={"logit_bias": many})))
        assert error.reason == "INVALID_REQUEST"
        assert 10 <= len(error.violations) <= 20
        assert "(and 599 more)" in str(error)


# --- the valid side of each bound ------------------------------------------------------------------------------------

GOOD_SAMPLING: list[dict[str, Any]] = [
    *({"temperature": t} for t in (0.0, -0.0)),
    *({"top_k": k} for k in (0, 1, VOCABULARY)),
    {"top_p": 1e-30},
    *({"seed": s} for s in (0, 2**64 - 1)),
    *({"max_tokens": n} for n in (1, CONTEXT - 1)),
    *({"min_tokens": n} for n in (0, CONTEXT)),
    {"min_tokens": 4, "max_tokens": 4},
    {"allowed_token_ids": [VOCABULARY - 1] * 4096},
    {"banned_token_ids": [VOCABULARY - 1] * 4096},
    {"banned_token_ids": list(range(1, VOCABULARY))},
    {"allowed_token_ids": [EOS]},
    {"begin_banned_token_ids": list(range(1, VOCABULARY))},
    {"forced_first_token_id": 0},
    {"bad_words": ["x" * 128] * 256},
    {"logit_bias": [sampling_pb2.LogitBias(token_id=i, bias=100 - 200 * (i % 2)) for i in range(300)]},
]


@pytest.mark.parametrize("sampling", GOOD_SAMPLING, ids=lambda s: str(s)[:40])
def test_bound_itself_is_valid(sampling: dict[str, Any]) -> None:
    checked = check(request(sampling=sampling), BOUNDS)
    for name, value in sampling.items():
        if hasattr(checked.sampling, name) and name not in ("logit_bias", "bad_words"):
            assert getattr(checked.sampling, name) == pytest.approx(value)


@pytest.mark.parametrize("texts", [["ok", "x" * 100_000], ["ok", ""], ["ok"] * 9], ids=["long", "empty", "many"])
def test_texts_of_a_wrong_size_are_not_read_on(texts: list[str]) -> None:
    """What is made of them may take seconds: a stop string of 100,000 characters did."""
    violations = Violations()
    assert checked_texts("stop.strings", texts, 8, 64, violations) == ()
    assert violations.violations


@pytest.mark.parametrize(
    "good",
    [
        request(request_id="x" * 128),
        request(request_id="A-z_0.9:".replace("_", "-")),
        request(priority=0),
        request(priority=255),
        request(stop={"strings": ["x" * 64, "é" * 32, "\n", " ", "a", "b", "c", "d"]}),
        request(stop={"token_ids": [VOCABULARY - 1] * 16}),
        request(output={"logprobs": True, "top_logprobs": 20}),
        request(output={"top_logprobs": 1}),
        request(output={"logprobs": False, "top_logprobs": 0}),
        request(text="x" * MAX_BYTES),
        request(text="😀" * (MAX_BYTES // 4)),
        request(text="\x00"),
        request(token_ids=pb.TokenIds(ids=[VOCABULARY - 1] * (CONTEXT - 1))),
        request(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="x" * 32, content="")])),
    ],
    ids=range(14),
)
def test_largest_valid_request_is_valid(good: pb.GenerateRequest) -> None:
    check(good, BOUNDS)


NOT_COPIED = {
    *("n", "best_of", "num_beams", "top_k", "forced_first_token_id", "seed", "min_tokens", "max_tokens", "ignore_eos")
}
"""Scalars of the schema whose range depends on the model or on each other; `bad_requests` has their bounds."""
SCALARS = [
    field.name
    for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields
    if field.type in (field.TYPE_FLOAT, field.TYPE_UINT32, field.TYPE_INT32)
    and field.has_presence
    and field.name not in NOT_COPIED
]
"""The scalar sampling parameters of the schema, read from the schema so that new ones are tested."""


@pytest.mark.parametrize("name", SCALARS)
def test_schema_parameter_reaches_the_wire(name: str) -> None:
    """Both bounds are valid, reach the worker under the same name and survive the codec; values beyond fail."""
    allowed, is_float = RANGES[name], isinstance(DEFAULTS[name], float)
    lowest = math.nextafter(allowed.lowest, math.inf) + 1e-6 if allowed.above_lowest else allowed.lowest
    for value in (lowest, allowed.highest):
        sampling = check(request(sampling={name: value}), BOUNDS).sampling
        plan = StepPlan(1, 1, (Row(0, 0, 1, True),), (SlotInit(0, (3,), 1, (), sampling),))
        (init,) = decode(encode(plan)).inits
        assert getattr(init.sampling, name) == pytest.approx(value)
    beyond = (allowed.lowest - 0.1, allowed.highest + 0.1, math.nan, math.inf) if is_float else (allowed.highest + 1,)
    for value in beyond:
        with pytest.raises(InvalidRequest, match=f"sampling.{name}: must be"):
            check(request(sampling={name: value}), BOUNDS)


@pytest.mark.parametrize("name", SCALARS)
def test_range_and_default_are_those_of_the_schemas_comment(name: str) -> None:
    text = (PROTOS / "sampling.proto").read_text()
    found = re.search(rf"((?:  //.*\n)+)  optional (?:float|u?int32) {name} = ", text)
    assert found is not None
    comment = found[1].replace("\n  //", "")
    intervals = re.findall(r"[\[(]-?[\d.]+, -?[\d.]+\]", comment)
    assert [str(RANGES[name]).removeprefix("0 or in ").removeprefix("in ")] == intervals
    default = re.search(r"Default (-?\d+(?:\.\d+)?)", comment)
    assert default is not None
    assert getattr(check(request(), BOUNDS).sampling, name) == DEFAULTS[name] == float(default[1])


def resolved(prompt: Sequence[int], **sampling: Any) -> dict[str, Any]:
    validated = check(request(sampling=sampling), BOUNDS)
    return resolve(validated, request(), prompt, "", validated.sampling, BOUNDS)


@pytest.mark.parametrize(
    ("prompt_len", "sampling", "max_tokens"),
    [(100, {"max_tokens": 28}, 28), (CONTEXT - 1, {}, 1), (CONTEXT - 5, {}, 5), (10, {}, 16)],
    ids=["its own", "one token", "the rest of the context", "the server's default"],
)
def test_prompt_and_output_share_the_context(prompt_len: int, sampling: dict[str, int], max_tokens: int) -> None:
    assert resolved([3] * prompt_len, **sampling)["max_tokens"] == max_tokens


@pytest.mark.parametrize(
    ("prompt_len", "sampling", "field"),
    [(100, {"max_tokens": 29}, "sampling.max_tokens"), (CONTEXT, {}, "text"), (CONTEXT + 1, {"max_tokens": 1}, "text")],
)
def test_too_long_prompt_error_has_the_figures(prompt_len: int, sampling: dict[str, int], field: str) -> None:
    with pytest.raises(PromptTooLong) as caught:
        resolved([3] * prompt_len, **sampling)
    figures = {"prompt_tokens": str(prompt_len), "context_length": "128"}
    if field == "sampling.max_tokens":
        figures["max_tokens"] = "29"
    assert caught.value.metadata == figures
    assert [v.field for v in caught.value.violations] == [field]


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "problem"),
    [
        ([3], {"min_tokens": 20}, InvalidRequest, r"sampling\.min_tokens"),
        ([], {}, InvalidRequest, "text: has no tokens"),
        ([VOCABULARY], {}, TokenOutOfVocabulary, "tokenizer"),
    ],
    ids=["unreachable min_tokens", "text without tokens", "tokenizer of another model"],
)
def test_prompt_that_does_not_fit_is_rejected(
    prompt: list[int], sampling: dict[str, int], error: type[InvalidRequest], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        resolved(prompt, **sampling)


@pytest.mark.parametrize(
    ("bad", "fields"),
    [
        (pb.TokenizeRequest(), {"input"}),
        (pb.TokenizeRequest(text="x" * (MAX_BYTES + 1)), {"text"}),
        (pb.TokenizeRequest(chat=pb.ChatMessages()), {"chat.messages"}),
        (pb.TokenizeRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user")] * 5)), {"chat.messages"}),
        (pb.TokenizeRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="")])), {"chat.messages[0].role"}),
    ],
)
def test_bad_tokenize_requests(bad: pb.TokenizeRequest, fields: set[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_tokenize(bad, BOUNDS.settings)
    assert {v.field for v in caught.value.violations} == fields
    check_tokenize(pb.TokenizeRequest(text=""), BOUNDS.settings)


def test_bad_detokenize_requests() -> None:
    with pytest.raises(TokenOutOfVocabulary) as caught:
        check_token_ids([1, 2, VOCABULARY], 512, VOCABULARY)
    assert [v.field for v in caught.value.violations] == ["token_ids[514]"]
    check_token_ids([1, 2, VOCABULARY - 1], 512, VOCABULARY)
    with pytest.raises(InvalidRequest, match="more than 10"):
        check_detokenize(pb.DetokenizeRequest(token_ids=[1] * 11), 10)
    check_detokenize(pb.DetokenizeRequest(token_ids=[1] * 10), 10)


def test_invalid_model_defaults_are_ignored() -> None:
    config = {"temperature": 0.7, "top_p": 0, "top_k": -1, "min_p": "0.5", "repetition_penalty": None, "bos": 1}
    assert model_defaults(config) == {"temperature": 0.7}
    assert model_defaults({"temperature": float("nan"), "top_k": 2.5}) == {}
