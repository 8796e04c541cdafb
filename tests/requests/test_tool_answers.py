"""Tool calls and reasoning in answers, over every way to read one, and resumed at every index."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from support.serving import EOS, HELLO, Serving, read_all, text_of, tokens_of, until
from support.tool_answers import TOKENIZER, ids, larger_serving, parts_of
from support.tool_templates import HERMES, LLAMA3, MISTRAL, TEMPLATES, written

from lineclear.scheduler.core.events import FinishReason
from lineclear.scheduler.text.parsed_answer import AnswerParsers, ParsedAnswerText, choose_parsers
from lineclear.scheduler.text.stop_strings import StopStrings
from lineclear.v1 import inference_pb2 as pb
from lineclear.wire.messages import Logprobs

CALLS = [("add", {"a": 1, "b": [2, "é"]}), ("now", {})]


def chat_request(*names: str, **fields: Any) -> pb.GenerateRequest:
    request = pb.GenerateRequest(**fields)
    request.chat.messages.add(role="user", content="quick")
    for name in names or ("add", "now"):
        request.chat.tools.add(name=name)
    request.sampling.seed = 7
    return request


@pytest.fixture
async def hermes(tmp_path: Path) -> AsyncIterator[Serving]:
    async with larger_serving(tmp_path, template=HERMES, tokenizer=TOKENIZER) as s:
        yield s


@pytest.fixture
async def mistral(tmp_path: Path) -> AsyncIterator[Serving]:
    async with larger_serving(tmp_path, template=MISTRAL, tokenizer=TOKENIZER) as s:
        yield s


async def answer_of(s: Serving, answer: Sequence[int], request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    s.engine.answer = lambda _: list(answer)
    return await read_all(s.generate(request))


ANSWERS = {
    "hermes": "Let me.\n" + written("hermes", *CALLS) + "</s>",
    "llama3_json": "<|python_tag|>" + written("llama3_json", *CALLS) + "</s>",
    "mistral": written("mistral", *CALLS) + "</s>",
    "mistral named": '[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2, "é"]}[TOOL_CALLS]now[ARGS]{}</s>',
    "thinking": "<think>\nAdd “é”?</think>" + written("hermes", *CALLS) + "</s>",
}
PREFIXES = {"hermes": "Let me.\n"}
FAMILIES = {name: "hermes" if name == "thinking" else name.split()[0] for name in ANSWERS}


@pytest.mark.parametrize("name", ANSWERS)
async def test_calls_are_typed_in_the_stream(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    async with larger_serving(tmp_path, template=TEMPLATES[family], tokenizer=TOKENIZER) as s:
        tokens = ids(ANSWERS[name])
        responses = await answer_of(s, tokens, chat_request())
        text, reasoning, calls = parts_of(responses)
        assert tokens_of(responses) == tokens
        assert text == PREFIXES.get(name, "")
        assert reasoning == ("\nAdd “é”?" if name == "thinking" else "")
        assert [(call[1], json.loads(call[2])) for call in calls] == CALLS
        assert len({call[0] for call in calls}) == 2
        assert all(len(call[0]) == 9 and call[0].isalnum() for call in calls)
        assert responses[-1].finished.finish_reason == pb.FINISH_REASON_TOOL_CALLS
        assert responses[-1].finished.matched_token_id == EOS


@pytest.mark.parametrize("name", ANSWERS)
async def test_resumed_at_every_index_nothing_is_doubled_or_missing(tmp_path: Path, name: str) -> None:
    async with larger_serving(tmp_path, template=TEMPLATES[FAMILIES[name]], tokenizer=TOKENIZER) as s:
        tokens = ids(ANSWERS[name])
        request = chat_request()
        request.sampling.max_tokens = len(tokens)
        whole = parts_of(await answer_of(s, tokens, request))
        parser = choose_parsers("auto", "auto", TEMPLATES[FAMILIES[name]])
        for have in range(len(tokens) + 1):
            released = ParsedAnswerText(TOKENIZER, parser, frozenset({"add", "now"}), silent_ids=frozenset({EOS}))
            released.begin([])
            pieces = [released.push(token) for token in tokens[:have]]
            request.resume.token_ids[:] = tokens[:have]
            request.resume.model_fingerprint = HELLO.model_fingerprint
            rest = [response async for response in s.generate(request)]
            text, reasoning, calls = "", "", dict[int, str]()
            for piece in pieces:
                text, reasoning = text + piece, reasoning + piece.reasoning
                for part in piece.calls:
                    calls[part.call] = calls.get(part.call, "") + part.arguments
            begun = set(calls)
            for response in rest:
                text, reasoning = text + response.text, reasoning + response.reasoning
                for delta in response.tool_calls:
                    assert bool(delta.id) == (delta.index not in begun)
                    if delta.id:
                        begun.add(delta.index)
                        assert delta.id == whole[2][delta.index][0]
                    calls[delta.index] = calls.get(delta.index, "") + delta.arguments
            assert (text, reasoning) == whole[:2]
            assert list(calls.values()) == [call[2] for call in whole[2]]
            assert rest[-1].finished.finish_reason == pb.FINISH_REASON_TOOL_CALLS


async def test_ids_differ_between_answers(hermes: Serving) -> None:
    first = parts_of(await answer_of(hermes, ids(ANSWERS["hermes"]), chat_request()))
    same = parts_of(await answer_of(hermes, ids(ANSWERS["hermes"]), chat_request()))
    other = chat_request()
    other.chat.messages.add(role="user", content="again")
    second = parts_of(await answer_of(hermes, ids(ANSWERS["hermes"]), other))
    assert first == same
    assert not {call[0] for call in first[2]} & {call[0] for call in second[2]}


async def test_each_of_several_outputs_has_calls_of_its_own(hermes: Serving) -> None:
    hermes.engine.answer = lambda _: ids(ANSWERS["thinking"])
    request = chat_request(sampling={"n": 2, "seed": 7})
    responses = [response async for response in hermes.generate(request)]
    first, second = (parts_of(r for r in responses if r.index == index) for index in range(2))
    assert first[:2] == second[:2]
    assert [call[1:] for call in first[2]] == [call[1:] for call in second[2]]
    assert len({call[0] for call in (*first[2], *second[2])}) == 4


async def test_chosen_outputs_are_parsed(hermes: Serving) -> None:
    wanted = parts_of(await answer_of(hermes, ids(ANSWERS["thinking"]), chat_request()))
    assert wanted[1]
    assert len(wanted[2]) == 2
    chosen = chat_request(sampling={"best_of": 3, "seed": 7})
    found = await answer_of(hermes, ids(ANSWERS["thinking"]), chosen)
    assert parts_of(found) == wanted
    assert found[-1].finished.finish_reason == pb.FINISH_REASON_TOOL_CALLS


async def test_beams_are_parsed(hermes: Serving) -> None:
    wanted = parts_of(await answer_of(hermes, ids(ANSWERS["thinking"]), chat_request()))
    hermes.engine.answer = None
    call = hermes.generate(chat_request(sampling={"num_beams": 2}))
    done = len(hermes.engine.submitted)
    for step, right in enumerate([*ids(ANSWERS["thinking"]), EOS]):
        count = 1 if step == 0 else 2
        await hermes.engine.next_request(done + count)
        for request in hermes.engine.submitted[done : done + count]:
            hermes.engine.start(request.request_id)
            top = ((right, 0.0), (3, -9.0), (4, -9.5), (5, -9.75))
            hermes.engine.tokens(request.request_id, [right], [Logprobs(0.0, top)])
            hermes.engine.finish_by(request.request_id, FinishReason.LENGTH)
        done += count
    call_end = [response async for response in call]
    (_, text, calls), (_, wanted_text, wanted_calls) = parts_of(call_end), wanted
    assert (text, [call[1:] for call in calls]) == (wanted_text, [call[1:] for call in wanted_calls])
    assert call_end[-1].finished.finish_reason == pb.FINISH_REASON_TOOL_CALLS


async def test_session_and_submitted_requests_send_the_same(hermes: Serving) -> None:
    expected = parts_of(await answer_of(hermes, ids(ANSWERS["thinking"]), chat_request()))
    assert len(expected[2]) == 2
    assert parts_of(await session_answer(hermes, ids(ANSWERS["thinking"]))) == expected
    request = chat_request(request_id="kept")
    await hermes.stub.Submit(pb.SubmitRequest(request=request))
    attached = [message.response async for message in hermes.stub.Attach(pb.AttachRequest(request_id="kept"))]
    assert parts_of(attached) == expected
    polled = await hermes.stub.GetResult(pb.GetResultRequest(request_id="kept"))
    assert parts_of([polled.response]) == expected
    assert polled.response.finished.finish_reason == pb.FINISH_REASON_TOOL_CALLS


async def session_answer(s: Serving, tokens: Sequence[int]) -> list[pb.GenerateResponse]:
    """Return the responses of a Session that gets each token in a message of its own."""
    answer, s.engine.answer = s.engine.answer, None
    call = s.stub.Session()
    await call.write(pb.SessionRequest(submits=[pb.SubmitCommand(handle=4, request=chat_request())]))
    key = await s.engine.next_request(len(s.engine.submitted) + 1)
    s.engine.start(key)
    responses: list[pb.GenerateResponse] = []
    for count, token in enumerate(tokens, 1):
        s.engine.tokens(key, [token])
        while len(tokens_of(responses)) < count:
            message = await call.read()
            responses += [event.response for event in message.events]
            assert not message.handles, "columns carry no calls"
    s.engine.finish_by(key, FinishReason.STOP_EOS, EOS)
    await call.done_writing()
    while (message := await call.read()) is not grpc.aio.EOF:
        responses += [event.response for event in message.events]
    s.engine.answer = answer
    return responses


async def test_attach_from_every_index_sends_the_rest(mistral: Serving) -> None:
    tokens = ids(ANSWERS["mistral"])
    call, key = await start(mistral, chat_request(request_id="kept"), is_submitted=True)
    for token in tokens:  # one message for each token
        mistral.engine.tokens(key, [token])
    mistral.engine.finish_by(key, FinishReason.STOP_EOS, EOS)
    await call
    await mistral.idle()

    async def rest(index: int) -> list[pb.GenerateResponse]:
        call = mistral.stub.Attach(pb.AttachRequest(request_id="kept", from_index=index))
        return [message.response async for message in call]

    expected = [call[2] for call in parts_of(await rest(0))[2]]
    for index in range(len(tokens)):
        # The earlier part of the same answer, as another server would have sent it.
        text = ParsedAnswerText(TOKENIZER, AnswerParsers("mistral"), frozenset({"add", "now"}))
        text.begin([])
        parts = itertools.chain.from_iterable(text.push(token).calls for token in tokens[:index])
        begun = {0: "", 1: ""}
        for part in parts:
            begun[part.call] += part.arguments
        for response in await rest(index):
            for delta in response.tool_calls:
                begun[delta.index] += delta.arguments
        assert list(begun.values()) == expected


async def start(s: Serving, request: pb.GenerateRequest, *, is_submitted: bool = False) -> tuple[Any, str]:
    call = s.stub.Submit(pb.SubmitRequest(request=request)) if is_submitted else s.generate(request)
    call = asyncio.ensure_future(_awaited(call)) if is_submitted else call
    await until(lambda: bool(s.engine.submitted))
    key = s.engine.submitted[-1].request_id
    s.engine.start(key)
    return call, key


async def _awaited(call: Any) -> Any:
    return await call


async def test_indices_and_logprobs_stay_with_their_tokens(hermes: Serving) -> None:
    tokens = ids(ANSWERS["hermes"])
    call, key = await start(hermes, chat_request(output={"logprobs": True, "token_timings": True}))
    for i, token in enumerate(tokens):
        hermes.engine.tokens(key, [token], [Logprobs(-float(i), ())])
    hermes.engine.finish_by(key, FinishReason.STOP_EOS, EOS)
    responses = await read_all(call)  # checks the indices
    assert [entry.logprob for r in responses for entry in r.logprobs] == [-float(i) for i in range(len(tokens))]
    assert len([t for r in responses for t in r.token_times_us]) == len(tokens)
    assert [call[1] for call in parts_of(responses)[2]] == ["add", "now"]


async def test_arguments_arrive_before_the_call_ends(hermes: Serving) -> None:
    call, key = await start(hermes, chat_request())
    hermes.engine.tokens(key, ids('<tool_call>{"name": "add", "arguments": {"a": 12'))
    seen: list[pb.GenerateResponse] = []
    while not parts_of(seen)[2] or parts_of(seen)[2][0][2] != '{"a": 12':
        seen.append(await call.read())
    hermes.engine.tokens(key, ids("34}}"))
    hermes.engine.finish_by(key, FinishReason.LENGTH)
    while not seen[-1].HasField("finished"):
        seen.append(await call.read())
    assert [call[1:] for call in parts_of(seen)[2]] == [("add", '{"a": 1234}')]
    assert seen[-1].finished.finish_reason == pb.FINISH_REASON_LENGTH


async def test_malformed_calls_are_text(mistral: Serving) -> None:
    for text in ("[TOOL_CALLS]nope[ARGS]{}", "[TOOL_CALLS] [{1", '[TOOL_CALLS] [{"name": "add", "arg'):
        responses = await answer_of(mistral, [*ids(text), EOS], chat_request())
        assert parts_of(responses) == (text, "", [])
        assert responses[-1].finished.finish_reason == pb.FINISH_REASON_STOP_EOS


async def test_special_tokens_written_as_text_are_no_markers(mistral: Serving) -> None:
    text = '[TOOL_CALLS]add[ARGS]{"a": 1}'
    spelled = [token for character in text for token in TOKENIZER.encode_sealed(character)]
    assert parts_of(await answer_of(mistral, spelled, chat_request())) == (text, "", [])
    assert len(parts_of(await answer_of(mistral, ids(text), chat_request()))[2]) == 1


async def test_requests_without_need_of_a_parser_get_text(tmp_path: Path) -> None:
    answer = ids(written("hermes", *CALLS))
    text = written("hermes", *CALLS)
    async with larger_serving(tmp_path, template=HERMES.replace("think>", ""), tokenizer=TOKENIZER) as s:
        no_tools = pb.GenerateRequest()
        no_tools.chat.messages.add(role="user", content="quick")
        forbidden = chat_request()
        forbidden.chat.tool_choice.mode = pb.TOOL_CHOICE_MODE_NONE
        for request in (no_tools, forbidden, pb.GenerateRequest(text="quick")):
            responses = await answer_of(s, answer, request)
            assert parts_of(responses) == (text, "", [])
        omitted = await answer_of(s, answer, chat_request(output={"omit_text": True}))
        assert parts_of(omitted) == ("", "", [])
        assert tokens_of(omitted) == answer


async def test_stop_strings_match_the_text_of_the_model(hermes: Serving) -> None:
    answer = ids("Hm. " + written("hermes", *CALLS) + "</s>")
    responses = await answer_of(hermes, answer, chat_request(stop={"strings": ["</tool_call>"]}))
    assert [call[1:] for call in parts_of(responses)[2]] == [("add", json.dumps(CALLS[0][1]))]
    assert responses[-1].finished.finish_reason == pb.FINISH_REASON_STOP_STRING
    cut = await answer_of(hermes, answer, chat_request(stop={"strings": ['"add']}))
    assert parts_of(cut) == ('Hm. <tool_call>\n{"name": ', "", [])


async def test_no_stop_string_and_no_character_spans_a_marker(mistral: Serving) -> None:
    request = chat_request(stop={"strings": ["stop"]})
    half = TOKENIZER.encode_sealed("😀")[:-1]
    for before, text in ((ids("st"), "st"), (half, "\ufffd")):
        answer = [*before, *ids("[TOOL_CALLS]add[ARGS]{}"), EOS]
        found = parts_of(await answer_of(mistral, answer, request))
        assert (found[0], [call[1:] for call in found[2]]) == (text, [("add", "{}")])


PROMPTS = {
    "opened by the template": ("{{ messages[0].content }}<think>\n", "why</think>yes", "why", "yes"),
    "closed by the template": ("{{ messages[0].content }}<think>\n\n</think>\n\n", "<think>x", "", "<think>x"),
    "opened by the model": ("{{ messages[0].content }}{# <think> #}", " \n<think>why</think>yes", "why", "yes"),
    "no reasoning": ("{{ messages[0].content }}{# <think> #}", " yes</think>", "", " yes</think>"),
    "later": ("{{ messages[0].content }}{# <think> #}", "yes <think>no</think>", "", "yes <think>no</think>"),
    "not closed": ("{{ messages[0].content }}<think>", "why </th", "why </th", ""),
    "deepseek": ("{{ messages[0].content }}{# <think>, <｜Assistant｜> #}", "why</think>yes", "why", "yes"),
    "deepseek opens": ("{{ messages[0].content }}{# <think>, <｜Assistant｜> #}", "<think>why</think>", "why", ""),
}


@pytest.mark.parametrize(("template", "answer", "reasoning", "text"), PROMPTS.values(), ids=PROMPTS)
async def test_reasoning_is_separated(tmp_path: Path, template: str, answer: str, reasoning: str, text: str) -> None:
    request = pb.GenerateRequest()
    request.chat.messages.add(role="user", content="quick")
    async with larger_serving(tmp_path, template=template, tokenizer=TOKENIZER) as s:
        responses = await answer_of(s, ids(answer), request)
        assert parts_of(responses) == (text, reasoning, [])
    async with larger_serving(tmp_path, template=template, tokenizer=TOKENIZER, reasoning_parser="none") as s:
        assert text_of(await answer_of(s, ids(answer), request)) == answer


async def test_parsers_are_chosen_logged_and_reported(tmp_path: Path) -> None:
    for template, settings_, expected in (
        (HERMES, {}, ("hermes", "qwen3")),
        (LLAMA3, {}, ("llama3_json", "")),
        (MISTRAL, {}, ("mistral", "")),
        ("{{ messages[0].content }}", {}, ("", "")),
        ("{# <tool_call><function= <｜Assistant｜></think> #}", {}, ("", "deepseek_r1")),
        (HERMES, {"tool_call_parser": "mistral", "reasoning_parser": "none"}, ("mistral", "")),
    ):
        with capture_logs() as logs:
            async with larger_serving(tmp_path, template=template, **settings_) as s:
                model = await s.stub.GetModel(pb.GetModelRequest())
        assert (model.tool_call_parser, model.reasoning_parser) == expected
        (line,) = [line for line in logs if line["event"] == "answer_parsers"]
        assert (line["tool_calls"], line["reasoning"]) == tuple(name or "none" for name in expected)


FRAGMENTS = ["<tool_call>", "</tool_call>", '{"name": "add", "arguments": {"a": 1', "}}", "é", "x "]
FRAGMENTS += ["<think>", "</think>"]
FRAGMENTS += ["[TOOL_CALLS]", "[ARGS]", "add", "{}", " [", "]", "<|python_tag|>", "stop", "st", "😀", "<|im_end|>"]


@given(
    token_parts=st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    parsers=st.builds(AnswerParsers, st.sampled_from(["", *TEMPLATES]), st.sampled_from(["", "qwen3", "deepseek_r1"])),
    stops=st.sampled_from([None, StopStrings(["stop"])]),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_parts_do_not_depend_on_the_split_into_tokens(
    token_parts: list[str], parsers: AnswerParsers, stops: StopStrings | None, data: st.DataObject
) -> None:
    """Ordinary text as few or as many tokens gives the same parts."""
    special = set(TOKENIZER.seal.private)

    def parts(tokens: Sequence[int]) -> tuple[str, str, list[tuple[str, str]]]:
        text = ParsedAnswerText(TOKENIZER, parsers, frozenset({"add"}), stops=stops)
        text.begin([])
        pieces = []
        for token in tokens:
            pieces.append(text.push(token))
            if text.match is not None:
                break
        else:
            pieces.append(text.finish())
        calls: dict[int, list[str]] = {}
        for part in (part for piece in pieces for part in piece.calls):
            call = calls.setdefault(part.call, ["", ""])
            call[0] += part.name
            call[1] += part.arguments
        return "".join(pieces), "".join(p.reasoning for p in pieces), [(name, text) for name, text in calls.values()]

    few = ids("".join(token_parts))
    many: list[int] = []
    for part in token_parts:
        if part in special or not data.draw(st.booleans()):
            many += ids(part)
        else:
            many += [token for character in part for token in TOKENIZER.encode_sealed(character)]
    assert parts(many) == parts(few)
