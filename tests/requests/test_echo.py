"""echo: the prompt comes once, before the answer, and the answer continues its text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.serving import HELLO, read_all, serving, text_of, text_request, tokens_of
from support.small_tokenizers import KINDS, definition
from support.toy import expected_scores
from support.toy_service import TOKENIZER, VOCABULARY, ToyService, answer, toy_service
from support.toy_service import text_of as text_of_ids

from lineclear.client import Client
from lineclear.errors import InvalidRequest, PromptTooLong
from lineclear.scheduler.text.detokenizer import decode
from lineclear.scheduler.text.tokenizer import Tokenizer
from lineclear.v1 import inference_pb2 as pb

PROMPT = [0, *TOKENIZER.encode_sealed("Hello, how are you?")]
PARAMS: dict[str, Any] = {"max_tokens": 5, "seed": 3, "ignore_eos": True, "echo": True}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyService]:
    with toy_service(tmp_path_factory.mktemp("toy"), "--max-prompt-bytes", "300") as service:
        yield service


@pytest.fixture(name="client")
def make_client(service: ToyService) -> Iterator[Client]:
    with Client(service.target) as client:
        yield client


def test_stream_has_the_prompt_once_before_the_answer(client: Client) -> None:
    with client.stream(PROMPT, **PARAMS) as stream:
        deltas = list(stream)
    (first,) = [delta for delta in deltas if delta.prompt_token_ids]
    assert first is deltas[0]
    assert first.prompt_text == "Hello, how are you?"
    result = stream.result
    assert (result.prompt_text, result.prompt_token_ids) == ("Hello, how are you?", tuple(PROMPT))
    tokens = answer(PROMPT, 5, seed=3, temperature=1.0)
    assert result.token_ids == tuple(tokens)
    assert result.prompt_text + result.text == text_of_ids([*PROMPT, *tokens])
    plain = client.generate(PROMPT, **PARAMS | {"echo": False})
    assert (plain.prompt_text, plain.prompt_token_ids, plain.text) == ("", (), result.text)


@pytest.mark.parametrize("route", ["session", "submit"])
@pytest.mark.parametrize("outputs", [{"n": 3}, {"n": 2, "best_of": 3}, {"num_beams": 2}], ids=str)
def test_all_outputs_share_one_prompt(service: ToyService, route: str, outputs: dict[str, int]) -> None:
    params = PARAMS | outputs
    with Client(service.target, sessions=route == "session") as client:
        if route == "submit":
            submitted = client.submit(PROMPT, **params)
            result = submitted.result()
            again = submitted.attach().read_all()
            assert again.prompt_token_ids == tuple(PROMPT), "each reader gets it"
        else:
            result, _ = client.generate_batch([PROMPT, PROMPT], concurrency=2, **params)
        assert (result.prompt_text, result.prompt_token_ids) == ("Hello, how are you?", tuple(PROMPT))
        assert len(result.outputs) == outputs.get("n", 1)


def test_attach_behind_the_first_token_does_not_repeat_it(client: Client) -> None:
    submitted = client.submit(PROMPT, **PARAMS)
    submitted.result()
    assert submitted.attach(2).read_all().prompt_token_ids == ()


def test_prompt_logprobs_are_those_of_the_echoed_tokens(client: Client) -> None:
    result = client.generate(PROMPT, **PARAMS, prompt_logprobs=0, logprobs=True, truncate_prompt_tokens=6)
    assert result.prompt_token_ids == tuple(PROMPT[-6:])
    right = [row.logprobs[0] for row in expected_scores(PROMPT[-6:], 0, 0, VOCABULARY)]
    assert [entry.logprob for entry in result.prompt_logprobs] == right
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids) - 1


def test_special_tokens_are_kept_on_request(client: Client) -> None:
    assert client.generate(PROMPT, **PARAMS, keep_special_tokens=True).prompt_text == "<s>Hello, how are you?"


def test_stop_strings_are_looked_for_in_the_answer_only(client: Client) -> None:
    assert client.generate(PROMPT, **PARAMS, stop=["how are"]).finish_reason == "length"


def test_what_cannot_be_echoed_is_refused(client: Client) -> None:
    with pytest.raises(InvalidRequest, match=r"output\.echo"):
        client.generate(PROMPT, **PARAMS, omit_text=True)
    long = [TOKENIZER.encode_sealed("Hello")[0]] * 100 + TOKENIZER.encode_sealed(" quick brown fox") * 20
    assert len(text_of_ids(long)) > 300
    with pytest.raises(PromptTooLong, match="300") as caught:
        client.generate(long, **PARAMS | {"max_tokens": 1})
    assert [violation.field for violation in caught.value.violations] == ["output.echo"]


@pytest.mark.parametrize("kind", KINDS)
async def test_answer_continues_the_prompt_at_any_resumed_token(tmp_path: Path, kind: str) -> None:
    """Some tokenizers omit the space of the first token of a text: the answer is no start of a text."""
    tokenizer = Tokenizer(definition(KINDS[kind]()))
    ids = tokenizer.encode_sealed("Hello, how are you today? I am fine.")
    prompt, rest = ids[:3], ids[3:]

    def request(received: list[int] | None = None) -> pb.GenerateRequest:
        message = text_request(output={"echo": True}, sampling={"seed": 5, "max_tokens": len(rest)})
        message.token_ids.ids[:] = prompt
        if received is not None:
            message.resume.token_ids[:] = received
            message.resume.model_fingerprint = HELLO.model_fingerprint
        return message

    async with serving(tmp_path, tokenizer=tokenizer) as s:
        s.engine.answer = lambda request: rest
        whole = await read_all(s.generate(request()))
        assert whole[0].prompt_echo.token_ids == prompt
        assert whole[0].prompt_echo.text + text_of(whole) == decode(tokenizer, ids, keep_special=False)
        for have in (0, 1, 2, len(rest)):
            parts = [response async for response in s.generate(request(rest[:have]))]
            assert [part.HasField("prompt_echo") for part in parts] == [have == 0] + [False] * (len(parts) - 1)
            assert rest[:have] + tokens_of(parts) == rest
            if have == 1:
                assert text_of(whole).endswith(text_of(parts))
        await s.idle()
