"""Requests with every sampling parameter and stop condition, and the expected answer to each.

For the toy worker this file computes the answer from the request alone: tokens and log probabilities with
`support.toy`, text and end by decoding byte by byte and searching for stop strings after each character.
"""

from __future__ import annotations

import codecs
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from support.toy import expected, expected_logprobs
from support.toy_service import EOS, TOKENIZER, VOCABULARY

from lineclear.client import Client, FinishReason, Generation, Output, Sampling, TokenLogprobs
from lineclear.wire.messages import Sampling as WireSampling
from lineclear.wire.sampling import SCALARS

ROUTES = ("generate", "session", "submit")
_UNMATCHED_STOPS = ("\x00never", "zzzzzz")


Logprobs = tuple[tuple[float, tuple[tuple[int, float], ...]], ...]
"""Of each token its log probability and those of the most likely tokens."""


@dataclass(frozen=True)
class Answer:
    """The fields of an output that must not change, whatever happens to the processes."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    matched_stop: str | int | None
    logprobs: Logprobs = ()
    prompt_logprobs: Logprobs = ()
    calls: tuple[tuple[str, str, str], ...] = ()
    """Id, name and arguments of each tool call."""
    score: float | None = None

    @classmethod
    def of(cls, got: Generation | Output) -> Answer:
        """Return the fields of a received answer or output."""
        calls = tuple((call.id, call.name, call.arguments) for call in got.tool_calls)
        return cls(
            got.token_ids, got.text, got.finish_reason, got.matched_stop, _plain_logprobs(got.logprobs), calls=calls
        )

    @classmethod
    def all_of(cls, got: Generation) -> tuple[Answer, ...]:
        """Return the fields of each output. The first has the log probabilities of the prompt."""
        first, *others = (replace(cls.of(output), score=output.score) for output in got.outputs)
        return replace(first, prompt_logprobs=_plain_logprobs(got.prompt_logprobs)), *others


def _plain_logprobs(entries: Sequence[TokenLogprobs]) -> Logprobs:
    return tuple((e.logprob, tuple((t.token_id, t.logprob) for t in e.top_logprobs)) for e in entries)


@dataclass(frozen=True)
class Question:
    """A request, its route, and its expected answer."""

    prompt: tuple[Any, ...]
    """Token ids, or the messages of a conversation."""
    sampling: Sampling
    right: Answer
    top_logprobs: int | None = None
    """Number of top log probabilities to request; None requests no log probabilities."""
    route: str = "generate"
    others: tuple[Answer, ...] = ()
    """The expected outputs behind the first."""
    more: Mapping[str, Any] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    """Names under which the answer is counted."""

    @property
    def params(self) -> dict[str, Any]:
        return {
            **({} if self.top_logprobs is None else {"logprobs": True, "top_logprobs": self.top_logprobs}),
            **self.more,
        }

    @property
    def arrives_whole(self) -> bool:
        """Whether the outputs are chosen at the end. The client does not resume such an answer."""
        sampling = self.sampling
        return (sampling.num_beams or 1) > 1 or (sampling.best_of or 1) > (sampling.n or 1)


@dataclass(frozen=True)
class Call:
    """A call that returns numbers, and the expected ones."""

    ask: Callable[[Client], tuple[float, ...]]
    right: tuple[float, ...]
    route: str
    features: tuple[str, ...] = ()


Ask = Callable[[], Question]
AskMixed = Callable[[], Question | Call]


def toy_questions(seed: int, routes: Sequence[str] = ("generate",)) -> Ask:
    """Return a function that makes an endless sequence of seeded questions, some with a common prefix. Thread-safe."""
    numbers, lock = count(), threading.Lock()

    def ask() -> Question:
        with lock:
            number = next(numbers)
        rng = random.Random(seed << 32 | number)
        shared = [7 * (number % 3) + i for i in range(32)]
        prompt = (*shared, *(rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 60))))
        sampling = _parameters(rng, number)
        top_logprobs = rng.choice((None, None, 0, 3))
        sampling = sampling.replace(stop=_stop_strings(rng, prompt, sampling))
        right = toy_answer(prompt, sampling, top_logprobs)
        return Question(prompt, sampling, right, top_logprobs, rng.choice(routes))

    return ask


def _parameters(rng: random.Random, number: int) -> Sampling:
    """Return parameters, each away from its default with probability 0.3."""
    fields: dict[str, Any] = {}
    drawn: dict[str, Any] = {
        "temperature": rng.choice((0.0, 0.3, 0.7, 1.5)),
        "top_k": rng.choice((1, 20)),
        "top_p": rng.choice((0.5, 0.95)),
        "min_p": 0.05,
        "repetition_penalty": rng.choice((0.8, 1.2)),
        "presence_penalty": rng.choice((-0.5, 0.75)),
        "frequency_penalty": rng.choice((-0.25, 1.0)),
        "logit_bias": {rng.randrange(VOCABULARY): rng.choice((-3.0, 2.5)) for _ in range(2)},
        "allowed_token_ids": tuple(sorted(rng.sample(range(VOCABULARY), 200))),
        "banned_token_ids": tuple(sorted(rng.sample(range(VOCABULARY), 20))),
        "stop_token_ids": tuple(sorted(rng.sample(range(1, VOCABULARY), 3))),
        "min_tokens": rng.randrange(1, 20),
    }
    for name, value in drawn.items():
        if rng.random() < 0.3:
            fields[name] = value
    ignore_eos = rng.random() < 0.7
    return Sampling(seed=number, max_tokens=rng.randrange(20, 160), ignore_eos=ignore_eos, **fields)


def _stop_strings(rng: random.Random, prompt: Sequence[int], sampling: Sampling) -> tuple[str, ...] | None:
    """Return stop strings: sometimes a part of the answer's text, and strings that never occur."""
    if rng.random() < 0.6:
        return None
    text = toy_answer(prompt, sampling, None).text
    pieces = [text[i : i + rng.randrange(1, 5)] for i in (rng.randrange(max(1, len(text))) for _ in range(2))]
    found = [piece for piece in pieces if piece and "\ufffd" not in piece]
    return tuple(dict.fromkeys((*found, *_UNMATCHED_STOPS)))


def toy_answer(prompt: Sequence[int], sampling: Sampling, top_logprobs: int | None) -> Answer:
    """Return the expected answer of a service with a toy worker."""
    wire = _wire_sampling(sampling, top_logprobs)
    assert sampling.max_tokens is not None
    tokens = expected(prompt, wire, sampling.max_tokens, VOCABULARY)
    characters = _characters(tokens, wire.stop_ids)
    text = "".join(character for character, _ in characters)
    reason = FinishReason.LENGTH
    matched: str | int | None = None
    if tokens[-1] in wire.stop_ids and len(tokens) > wire.min_tokens:
        is_eos = tokens[-1] == EOS and not sampling.ignore_eos
        reason, matched = (FinishReason.STOP_EOS if is_eos else FinishReason.STOP_TOKEN), tokens[-1]
    stops = (sampling.stop,) if isinstance(sampling.stop, str) else sampling.stop or ()
    for end, (_, num_tokens) in enumerate(characters, 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found and num_tokens >= wire.min_tokens:
            stop = max(found, key=len)
            cut = end if sampling.include_stop_string else end - len(stop)
            tokens, text, reason, matched = tokens[:num_tokens], text[:cut], FinishReason.STOP_STRING, stop
            break
    return Answer(tuple(tokens), text, reason, matched, _logprobs(prompt, tokens, wire))


def _logprobs(prompt: Sequence[int], tokens: Sequence[int], wire: WireSampling) -> Logprobs:
    found = expected_logprobs(prompt, tokens, wire, VOCABULARY)
    return tuple((entry.logprob, entry.top) for entry in found if entry is not None)


def _wire_sampling(sampling: Sampling, top_logprobs: int | None) -> WireSampling:
    """Return the parameters that the worker must receive. The service's default temperature is 1."""
    given = {name: value for name in SCALARS if (value := getattr(sampling, name, None)) is not None}
    eos = () if sampling.ignore_eos else (EOS,)
    return WireSampling(
        **{"temperature": 1.0, **given, "logprobs": -1 if top_logprobs is None else top_logprobs},
        logit_bias=tuple((sampling.logit_bias or {}).items()),
        allowed_ids=tuple(sampling.allowed_token_ids or ()),
        banned_ids=tuple(sampling.banned_token_ids or ()),
        stop_ids=tuple(sorted({*eos, *(sampling.stop_token_ids or ())})),
    )


def _characters(tokens: Sequence[int], silent_ids: Sequence[int]) -> list[tuple[str, int]]:
    """Return each character of the text of `tokens` with the number of tokens that complete it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    found: list[tuple[str, int]] = []
    first = True
    for number, token in enumerate(tokens, 1):
        if token in silent_ids or TOKENIZER.is_special(token):
            continue
        piece = TOKENIZER.piece(token, first=first)
        if piece is not None:
            first = False
            found += [(character, number) for character in decoder.decode(piece)]
    return found + [(character, len(tokens)) for character in decoder.decode(b"", True)]
