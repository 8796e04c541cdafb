"""The answers of the toy model, which `support.toy_runner` gives: hashes of the whole context and of all parameters.

`expected` and `expected_logprobs` compute the right answer from the request alone.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import struct
from array import array
from collections.abc import Collection, Sequence
from typing import Any

from support.toy_grammar import permitted

from lineclear.wire.messages import (
    Logprobs,
    Pooling,
    PoolingKind,
    Sampling,
    Scores,
)
from lineclear.wire.sampling import SCALARS, Use

STUCK = -1
"""In place of a token, where the parameters of a request allow none."""

_NEUTRAL = Sampling()


def fingerprint(model: str) -> str:
    """Return the model fingerprint in the Hello of a worker with that model."""
    return f"toy{model}"


def with_adapter(model: str, key: bytes) -> str:
    """Return the `model` argument of `sample` and `expected` for requests with an adapter; `key` empty: none."""
    return f"{model}+{key.hex()}" if key else model


def sample(
    context: Sequence[int],
    sampling: Sampling,
    prompt_len: int,
    vocab_size: int,
    model: str = "",
    masked: Collection[int] | None = None,
) -> tuple[int, Logprobs | None]:
    """Return the token after `context` and its logprobs, a pure function of the arguments.

    Another `model` gives other tokens. `masked` are the tokens that a grammar allows; if it leaves none, STUCK.
    Log probabilities are exact in single precision, and None where the request does not ask for them.
    """
    forbidden = set(sampling.banned_ids)
    if len(context) - prompt_len < sampling.min_tokens:
        forbidden.update(sampling.stop_ids)
    # Without an allowed token left, any may be sampled.
    allowed = sorted(set(sampling.allowed_ids if masked is None else masked) - forbidden)
    if masked is not None and not allowed:
        return STUCK, None if sampling.logprobs < 0 else Logprobs(0.0)
    data = array("i", context).tobytes() + sampling.seed.to_bytes(8, "little") + _parameters(sampling, prompt_len)
    data += model.encode()
    number = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    token = allowed[number % len(allowed)] if allowed else number % vocab_size
    while not allowed and token in forbidden and len(forbidden) < vocab_size:
        token = (token + 1) % vocab_size
    if sampling.logprobs < 0:
        return token, None
    logprob = -((number >> 40) % 4096) / 256
    top = tuple(((token + i) % vocab_size, logprob - i) for i in range(sampling.logprobs))
    return token, Logprobs(logprob, top + tuple((i, logprob - i % 8) for i in sampling.logprob_ids))


def expected(
    prompt: Sequence[int],
    sampling: Sampling,
    max_tokens: int,
    vocab_size: int,
    model: str = "",
    received: Sequence[int] = (),
) -> list[int]:
    """Return the whole answer to a request, run alone: to the first stop token inclusive, at most `max_tokens`.

    It begins with the `received` tokens, and ends where the grammar of the request allows no token.
    """
    context = [*prompt, *received]
    for _ in range(max_tokens - len(received)):
        masked = permitted(sampling, context[len(prompt) :], vocab_size)
        token, _ = sample(context, sampling, len(prompt), vocab_size, model, masked)
        if token == STUCK:
            break
        context.append(token)
        if context[-1] in sampling.stop_ids and len(context) - len(prompt) > sampling.min_tokens:
            break
    return context[len(prompt) :]


def expected_logprobs(
    prompt: Sequence[int], answer: Sequence[int], sampling: Sampling, vocab_size: int
) -> list[Logprobs | None]:
    """Return the logprobs of each token of `answer`."""
    whole, length = [*prompt, *answer], len(prompt)
    return [sample(whole[: length + i], sampling, length, vocab_size)[1] for i in range(len(answer))]


def score(context: Sequence[int], token: int, num_top: int, vocab_size: int, model: str = "") -> Scores:
    """Return the score of `token` behind `context`, and those of the `num_top` most likely tokens."""
    data = array("i", [*context, token]).tobytes() + b"score" + model.encode()
    number = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    logprob = -(number % 4096) / 256
    top = [(number + i) % vocab_size for i in range(num_top)]
    return Scores((logprob,), tuple(top), tuple(logprob - i for i in range(num_top)))


def expected_scores(
    prompt: Sequence[int], first_position: int, num_top: int, vocab_size: int, model: str = ""
) -> list[Scores]:
    """Return the score of each position of a prompt from `first_position` on."""
    positions = range(first_position, len(prompt) - 1)
    return [score(prompt[: p + 1], prompt[p + 1], num_top, vocab_size, model) for p in positions]


def vector(contexts: Sequence[Sequence[int]], pooling: Pooling, model: str = "") -> bytes:
    """Return the vector of a sequence from the context of each of its positions."""
    used = contexts if pooling.kind is PoolingKind.MEAN else contexts[-1:]
    data = b"".join(array("i", context).tobytes() for context in used) + model.encode()
    data += struct.pack("<ii?", len(used), pooling.dimensions, pooling.normalize)
    return hashlib.blake2b(data, digest_size=8).digest()


def expected_vector(prompt: Sequence[int], pooling: Pooling, model: str = "") -> bytes:
    return vector([prompt[: p + 1] for p in range(len(prompt))], pooling, model)


@functools.lru_cache(maxsize=1024)
def _parameters(sampling: Sampling, prompt_len: int) -> bytes:
    """Return the parameters as bytes, single precision as on the wire; nothing while all are neutral.

    Temperature 1, the service's default, is as neutral as 0, the wire's. Penalties depend on where the output begins.
    `sample` itself applies the parameters in `_APPLIED`.
    """
    data = b""
    for field in dataclasses.fields(sampling):
        value = getattr(sampling, field.name)
        if field.name in _APPLIED or (field.name, value) == _DEFAULT:  # a seed may have more than 63 bits
            continue
        if _encoded(value) == _encoded(getattr(_NEUTRAL, field.name)):
            continue
        data += field.name.encode() + _encoded(value)
        if field.name in SCALARS and SCALARS[field.name].use is Use.PENALTY:
            data += struct.pack("<i", prompt_len)
    return data


_APPLIED = {"allowed_ids", "banned_ids", "stop_ids", "min_tokens", "seed", "logprobs", "logprob_ids"}
_DEFAULT = ("temperature", 1.0)


def _encoded(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode() + b"\0"
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_encoded, value)) + b")"
    return struct.pack("<f", value) if isinstance(value, float) else struct.pack("<q", value)
