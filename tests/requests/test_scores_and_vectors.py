"""Score, Embed and prompt_logprobs through the real scheduler, client and sockets, with a toy worker."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.toy import expected_logprobs, expected_scores, expected_vector
from support.toy_service import TOKENIZER, VOCABULARY, ToyService, answer, toy_service
from typer.testing import CliRunner, Result

from lineclear import errors
from lineclear.cli import output
from lineclear.cli.app import app
from lineclear.client import Client, Generation
from lineclear.exit_codes import ExitCode
from lineclear.scheduler.requests.validate import request as validation
from lineclear.scheduler.requests.validate.request import ModelBounds
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.v1 import inference_pb2 as pb
from lineclear.wire.messages import Pooling, PoolingKind, Sampling

PROMPT = list(range(1, 40))
LONG = list(range(1, 200))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyService]:
    options = {"max_model_len": 256, "num_blocks": 512, "block_size": 16}
    flags = "--target-batch-tokens", "32", "--max-queue-size", "200"
    with toy_service(tmp_path_factory.mktemp("toy"), *flags, **options) as service:
        yield service


@pytest.fixture(name="client")
def make_client(service: ToyService) -> Iterator[Client]:
    with Client(service.target) as client:
        yield client


def right(prompt: list[int], first: int, num_top: int = 0) -> list[tuple[float, list[tuple[int, float]]]]:
    """Return the logprob of each token behind position `first`, with the most likely ones."""
    rows = expected_scores(prompt, first, num_top, VOCABULARY)
    return [(x.logprobs[0], list(zip(x.top_ids, x.top_logprobs, strict=True))) for x in rows]


def plain(logprobs: Any) -> list[tuple[float, list[tuple[int, float]]]]:
    return [(x.logprob, [(top.token_id, top.logprob) for top in x.top_logprobs]) for x in logprobs]


def test_truncated_prompts_have_the_scores_and_vectors_of_their_ends(client: Client) -> None:
    whole, end = client.score(PROMPT, [[7, 8]], truncate_prompt_tokens=5), client.score(PROMPT[-5:], [[7, 8]])
    assert whole.scores == end.scores
    assert whole.prompt_tokens == end.prompt_tokens == 5
    found = client.embed([PROMPT, PROMPT[:3]], truncate_prompt_tokens=5)
    assert found.vectors == client.embed([PROMPT[-5:], PROMPT[:3]]).vectors
    assert found.prompt_tokens == 8
    too_long = list(range(1, 400))
    assert client.score(too_long, [[7]], truncate_prompt_tokens=9).prompt_tokens == 9
    assert client.embed([too_long], truncate_prompt_tokens=9).prompt_tokens == 9


def test_scores_of_continuations(client: Client) -> None:
    continuations = [[7, 8, 9], [7], [500, 2]]
    found = client.score(PROMPT, continuations, top_logprobs=2)
    assert [list(x.token_ids) for x in found.scores] == continuations
    for score, tokens in zip(found.scores, continuations, strict=True):
        assert plain(score.logprobs) == right([*PROMPT, *tokens], len(PROMPT) - 1, 2)
        assert score.total_logprob == sum(x.logprob for x in score.logprobs)
    assert found.prompt_tokens == len(PROMPT)
    assert found.scores[found.best].total_logprob == max(x.total_logprob for x in found.scores)
    again = client.score(PROMPT, continuations)
    assert 3 * 32 <= again.cached_tokens <= 3 * (len(PROMPT) - 1), "the last prompt position has the first score"


@pytest.mark.parametrize("prompt", [PROMPT, LONG, [5]], ids=len)
def test_prompt_logprobs_come_once(client: Client, prompt: list[int]) -> None:
    with client.stream(prompt, max_tokens=4, temperature=1.0, seed=3, ignore_eos=True, prompt_logprobs=1) as stream:
        deltas = list(stream)
    having = [delta for delta in deltas if delta.prompt_logprobs]
    assert len(having) == (len(prompt) > 1)
    assert [delta.first_index for delta in having] == [0] * len(having)
    assert plain(stream.result.prompt_logprobs) == right(prompt, 0, 1)
    assert list(stream.result.token_ids) == answer(prompt, 4, seed=3)


def test_prompt_logprobs_in_session(service: ToyService) -> None:
    """Requests that run at the same time share a Session."""
    with Client(service.target, sessions=True) as client:
        options: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True, "prompt_logprobs": 0}
        found = client.generate_batch([[i, *PROMPT] for i in range(1, 9)], concurrency=8, **options)
        for i, result in enumerate(found, 1):
            assert plain(result.prompt_logprobs) == right([i, *PROMPT], 0)
        submitted = client.submit(PROMPT, **options)
        assert plain(submitted.result().prompt_logprobs) == right(PROMPT, 0)
        assert plain(submitted.attach().read_all().prompt_logprobs) == right(PROMPT, 0), "each reader gets them"
        with submitted.attach(from_index=1) as rest:
            assert [delta.prompt_logprobs for delta in rest if delta.token_ids] == [()], "they come with index 0"


def of_tokens(generation: Generation, given: list[int]) -> list[list[tuple[int, float]]]:
    """Return the log-probabilities of the given tokens that the toy worker has at the places of an answer."""
    sampling = Sampling(temperature=1.0, seed=3, logprobs=1, logprob_ids=tuple(given))
    rows = expected_logprobs(PROMPT, generation.token_ids, sampling, VOCABULARY)
    return [list(row.top[1:]) for row in rows if row is not None]


@pytest.mark.parametrize("sessions", [False, True])
def test_logprobs_of_given_tokens(service: ToyService, sessions: bool) -> None:
    given = [9, 500, 9]
    options: dict[str, Any] = {"max_tokens": 5, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    options |= {"logprob_token_ids": given, "top_logprobs": 1}
    with Client(service.target, sessions=sessions) as client:
        for found in (client.generate(PROMPT, **options), client.submit(PROMPT, **options).result()):
            assert list(found.token_ids) == answer(PROMPT, 5, seed=3)
            assert [plain([x])[0][1][0][0] for x in found.logprobs] == list(found.token_ids)
            by_id = [[(x.token_id, x.logprob) for x in entry.token_id_logprobs] for entry in found.logprobs]
            assert by_id == of_tokens(found, given)
            assert not client.generate(PROMPT, max_tokens=1, logprobs=True).logprobs[0].token_id_logprobs


@pytest.mark.parametrize("pooling", ["last_token", "mean"])
@pytest.mark.parametrize("normalize", [True, False])
def test_vectors(client: Client, pooling: Any, normalize: bool) -> None:
    inputs = [PROMPT, "some text", LONG, [3]]
    found = client.embed(inputs, pooling=pooling, normalize=normalize, dimensions=2)
    kind = PoolingKind.MEAN if pooling == "mean" else PoolingKind.LAST
    tokens = [TOKENIZER.encode(x) if isinstance(x, str) else x for x in inputs]
    wanted = [struct.unpack("<2f", expected_vector(x, Pooling(kind, 2, normalize))) for x in tokens]
    assert [str(x) for x in found.vectors] == [str(x) for x in wanted]
    assert found.prompt_tokens == sum(map(len, tokens))


@pytest.mark.parametrize(
    ("call", "path"),
    [
        (lambda c: c.score(PROMPT, [[7]], truncate_prompt_tokens=0), "truncate_prompt_tokens"),
        (lambda c: c.embed([PROMPT], truncate_prompt_tokens=0), "truncate_prompt_tokens"),
        (lambda c: c.score(PROMPT, []), "continuations"),
        (lambda c: c.score(PROMPT, [[]]), "continuations[0].token_ids.ids"),
        (lambda c: c.score(PROMPT, [[1], [VOCABULARY]]), "continuations[1].token_ids.ids[0]"),
        (lambda c: c.score([], [[1]]), "token_ids.ids"),
        (lambda c: c.score("", [[1]]), "text"),
        (lambda c: c.score(PROMPT, [[1]], top_logprobs=21), "top_logprobs"),
        (lambda c: c.score(PROMPT, [[1] * 217]), "continuations[0]"),
        (lambda c: c.score(PROMPT, [[1]] * 129), "continuations"),
        (lambda c: c.score(PROMPT, [[1]], priority=256), "priority"),
        (lambda c: c.embed([]), "inputs"),
        (lambda c: c.embed([""]), "inputs[0]"),
        (lambda c: c.embed([[1] * 256]), "inputs[0]"),
        (lambda c: c.embed([[1]], dimensions=0), "dimensions"),
        (lambda c: c.embed([[1]], dimensions=3), "dimensions"),
        (lambda c: c.generate(PROMPT, prompt_logprobs=21), "output.prompt_logprobs"),
        (lambda c: c.generate(PROMPT, best_of=2, logprob_token_ids=[1]), "output.logprob_token_ids"),
    ],
)
def test_invalid_fields_are_named(client: Client, call: Any, path: str) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        call(client)
    assert path in [violation.field for violation in caught.value.violations], caught.value


def long_call(client: Client, pool: ThreadPoolExecutor) -> Future[Any]:
    """Return the running call of 128 vectors, which takes 120 steps of 10 ms and more."""
    before = client.stats().counters.prompt_tokens
    call = pool.submit(client.embed, [[number, *range(1, 30)] for number in range(128)], dimensions=2)
    while client.stats().counters.prompt_tokens == before:
        assert not call.done()
    return call


def assert_right(call: Future[Any]) -> None:
    pooling = Pooling(PoolingKind.LAST, 2, normalize=True)
    wanted = [struct.unpack("<2f", expected_vector([number, *range(1, 30)], pooling)) for number in range(128)]
    assert [str(x) for x in call.result().vectors] == [str(x) for x in wanted]


def test_a_request_waits_for_the_next_parts_of_a_call_only(tmp_path: Path) -> None:
    """A server that stops completes all parts of a call."""
    flags = "--target-batch-tokens", "32", "--drain-timeout-seconds", "60"
    steps = {"min_step_seconds": 0.01, "max_step_seconds": 0.01, "num_blocks": 512, "block_size": 16}
    with (
        toy_service(tmp_path, *flags, **steps) as service,
        Client(service.target, max_attempts=1) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        call = long_call(client, pool)
        found = client.generate(PROMPT, max_tokens=1, temperature=1.0, seed=3, ignore_eos=True)
        assert list(found.token_ids) == answer(PROMPT, 1, seed=3)
        assert not call.done()
        assert_right(call)
        assert client.stats().counters.prompt_tokens == 128 * 30 + len(PROMPT)
        call = long_call(client, pool)
        code = service.stop()
        assert_right(call)
        assert code == 0


def command(service: ToyService, *arguments: str, given: str = "") -> Result:
    return CliRunner().invoke(app, [*arguments, "--target", service.target], input=given, env={"COLUMNS": "200"})


def rows(done: Result) -> list[Any]:
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_score_command(service: ToyService, tmp_path: Path) -> None:
    scores = rows(command(service, "score", "Once upon a", " time", " hill", "--json", "--top-logprobs", "2"))
    assert [entry["continuation"] for entry in scores] == [" time", " hill"]
    prompt = TOKENIZER.encode("Once upon a")
    tokens = [token for token, _ in scores[0]["tokens"]]
    assert TOKENIZER.encode("Once upon a time") == [*prompt, *tokens]
    wanted = right([*prompt, *tokens], len(prompt) - 1, 2)
    assert [x for _, x in scores[0]["tokens"]] == [x for x, _ in wanted]
    assert scores[0]["top_logprobs"] == [[list(entry) for entry in top] for _, top in wanted]
    (tmp_path / "lines").write_text(" time\n\n hill\n")
    plain = command(service, "score", "-", "--file", str(tmp_path / "lines"), given="Once upon a\n")
    assert plain.stdout.splitlines() == [f"{x['total_logprob']:.4f}\t{x['continuation']}" for x in scores]
    piped = command(service, "score", "Once upon a", "--file", "-", given=" time\n hill\n")
    assert piped.stdout == plain.stdout


def test_embed_command(service: ToyService, tmp_path: Path) -> None:
    options = "--pooling", "mean", "--dimensions", "2", "--no-normalize"
    texts = [f"text {n}" for n in range(150)]  # more than a call takes
    (tmp_path / "lines").write_text("\n".join(texts))
    vectors = rows(command(service, "embed", "--file", str(tmp_path / "lines"), *options))
    assert [entry["index"] for entry in vectors] == list(range(150))
    pooling = Pooling(PoolingKind.MEAN, 2, normalize=False)
    for text, entry in zip(texts, vectors, strict=True):
        wanted = struct.unpack("<2f", expected_vector(TOKENIZER.encode(text), pooling))
        assert entry["embedding"] == json.loads(output.json_line(wanted)), "NaN is null"
    assert rows(command(service, "embed", *texts[:2], *options, "--json")) == vectors[:2]
    assert rows(command(service, "embed", *options, given="text 0\ntext 1\n")) == vectors[:2]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["score", "x"], ExitCode.USAGE, "CONTINUATIONS"),
        (["score", "-", "--file", "-"], ExitCode.USAGE, "not both"),
        (["score", "x", "y", "--top-logprobs", "21"], 103, "top_logprobs"),
        (["score", "", "y"], 103, "text"),
        (["score", "x", "y", "--adapter", "none"], 105, "no adapter"),
        (["embed", "x", "--file", "-"], ExitCode.USAGE, "one of INPUTS"),
        (["embed", "--file", "/none"], ExitCode.USAGE, "/none"),
        (["embed"], ExitCode.USAGE, "there is no text"),
        (["embed", "x", "--dimensions", "3"], 103, "dimensions"),
    ],
)
def test_commands_exit_with_codes(service: ToyService, arguments: list[str], code: int, message: str) -> None:
    done = command(service, *arguments)
    assert (done.exit_code, done.stdout) == (code, ""), done.stderr
    assert message in done.stderr


def test_number_of_prompt_logprobs_is_bounded() -> None:
    bounds = ModelBounds(100_000, 1000, SchedulerSettings(), 256)
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), output=pb.OutputOptions(prompt_logprobs=1))
    validated = validation.check(message, bounds)
    assert validation.resolve(validated, message, [1] * 32768, "", validated.sampling, bounds)["scoring"] is not None
    with pytest.raises(errors.InvalidRequest, match="65538 log-probabilities"):
        validation.resolve(validated, message, [1] * 32769, "", validated.sampling, bounds)


def test_logprob_token_ids_alone_ask_for_log_probabilities() -> None:
    bounds = ModelBounds(100, 1000, SchedulerSettings(), 256)
    message = pb.GenerateRequest(text="x", output=pb.OutputOptions(logprob_token_ids=[7, 7]))
    sampling = validation.check(message, bounds).sampling
    assert (sampling.logprobs, sampling.logprob_ids) == (0, (7, 7))
