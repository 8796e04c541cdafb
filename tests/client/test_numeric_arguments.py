"""Each numeric argument of a client refuses what is no number of its kind, and takes numbers of numpy."""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from lineclear.client import AdminClient, Client, Request, RetryPolicy, Sampling
from lineclear.client.call_settings import client_config
from lineclear.client.testing import FakeTransport
from lineclear.errors import InvalidRequest


def calling(run: Callable[..., Any]) -> Callable[..., Any]:
    def call(**given: Any) -> Any:
        with Client(transport=FakeTransport("a b c d"), max_attempts=1) as client:
            return run(client, **given)

    return call


CALLS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "Client": (client_config, lambda **given: Client(transport=FakeTransport("a"), **given).generate("x")),
    "RetryPolicy": (RetryPolicy, RetryPolicy),
    "Sampling": (Sampling, lambda **given: Request(prompt="a", sampling=Sampling(**given)).to_proto()),
    "Request": (Request, calling(lambda client, **given: client.generate("a", **given))),
    "iter_batch": (Client.iter_batch, calling(lambda client, **given: list(client.iter_batch(["a"], **given)))),
    "as_completed": (Client.as_completed, calling(lambda client, **given: list(client.as_completed(["a"], **given)))),
    "generate_batch": (Client.generate_batch, calling(lambda client, **given: client.generate_batch(["a"], **given))),
    "score": (Client.score, calling(lambda client, **given: client.score("a", ["b"], **given))),
    "embed": (Client.embed, calling(lambda client, **given: client.embed(["b"], **given))),
    "cancel": (Client.cancel, calling(lambda client, **given: client.cancel("b", **given))),
    "attach": (Client.submit, calling(lambda client, **given: client.submit("b").attach(**given).read_all())),
    "watch_steps": (AdminClient.watch_steps, calling(lambda client, **given: watched(client, **given))),
}
EXTRA = {
    "attach": {"from_index": int, "timeout_seconds": float},
    "iter_batch": {"concurrency": int, "window": int},
    "as_completed": {"concurrency": int, "window": int},
    "generate_batch": {"concurrency": int},
}
"""Arguments of a call that the signature of the function beside it does not name."""


def watched(client: Client, **given: Any) -> None:
    try:
        next(AdminClient(client).watch_steps(**given))
    except ValueError as error:  # the fake transport has no steps; the request is made before
        if "has no" not in str(error):
            raise


def numeric() -> Iterator[tuple[str, str, type]]:
    for call, (function, _) in CALLS.items():
        if call in EXTRA:
            yield from ((call, name, kind) for name, kind in EXTRA[call].items())
            continue
        own = set(inspect.signature(function).parameters)
        for name, hint in typing.get_type_hints(function).items():
            kinds = set(typing.get_args(hint)) or {hint}
            if name in own and kinds & {int, float} and kinds <= {int, float, type(None)} | OTHERS:
                yield call, name, int if int in kinds else float


UNBOUNDED = {"Client", "RetryPolicy", "iter_batch", "as_completed", "generate_batch"}
OTHERS = {typing.get_args(typing.get_type_hints(Request)["timeout_seconds"])[1]}


NUMERIC = list(numeric())
assert len(NUMERIC) > 50


@pytest.mark.parametrize(("call", "name", "kind"), NUMERIC)
def test_numeric_argument_is_checked(call: str, name: str, kind: type) -> None:
    run = CALLS[call][1]
    bad: list[Any] = [True, False, "3", b"3", [1], 1j, np.bool_(True), np.array([1, 2])]
    bad += [math.nan, math.inf, 1.5, 2.0, -(10**400)] if kind is int else []
    bad += [10**400, 2**64] if kind is int and call not in UNBOUNDED else []
    bad += [math.nan] if name.endswith("seconds") else []
    for value in bad:
        with pytest.raises((ValueError, InvalidRequest), match=name):
            run(**{name: value})
    run(**{name: np.int64(2) if kind is int else np.float32(2.0)})


@pytest.mark.parametrize("name", ["logprobs", "echo", "omit_text", "ignore_eos", "include_stop_string"])
def test_a_number_is_no_boolean(name: str) -> None:
    for value in (5, 1, "yes", np.int64(1)):
        with pytest.raises(InvalidRequest, match="must be true or false"):
            Request.of("a", **{name: value}).to_proto()
    Request.of("a", **{name: np.bool_(True)}).to_proto()


IDS = [5, 6]


@pytest.mark.parametrize("ids", [np.array(IDS), np.array(IDS, np.uint8), tuple(IDS), range(5, 7), [np.int64(5), 6]])
def test_token_ids_of_any_sequence_of_integers(ids: Any) -> None:
    request = Request(
        prompt=ids, sampling=Sampling(stop_token_ids=ids, allowed_token_ids=ids), logprob_token_ids=ids
    ).to_proto()
    found = (request.token_ids.ids, request.stop.token_ids, request.sampling.allowed_token_ids)
    assert [list(x) for x in (*found, request.output.logprob_token_ids)] == [IDS] * 4
    transport = FakeTransport("a")
    with Client(transport=transport) as client:
        client.score(ids, [ids])
        client.embed(np.array([IDS, IDS]))
        client.detokenize(ids)
        client.generate_batch(np.array([IDS, IDS]))
        messages = [call.message for call in transport.calls]
    assert list(messages[0].continuations[0].token_ids.ids) == list(messages[0].token_ids.ids) == IDS
    assert [list(x.token_ids.ids) for x in messages[1].inputs] == [IDS, IDS]
    assert list(messages[2].token_ids) == IDS


@pytest.mark.parametrize(
    "ids",
    [np.array([1.5]), np.array([[1], [2]]), {1, 2}, {1: 2}, iter([1]), b"12", 5, None],
    ids=lambda ids: type(ids).__name__,
)
def test_what_is_no_sequence_of_integers_is_refused(ids: Any) -> None:
    with pytest.raises(InvalidRequest):
        Request(prompt=ids).to_proto()
