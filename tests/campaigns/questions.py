"""Requests with every sampling parameter and stop condition, and the only right answer to each.

For the toy worker the answer is computed here from the request alone: tokens and log probabilities by `support.toy`,
the text and the end by decoding byte by byte and looking for stop strings at every character.
"""

from __future__ import annotations

import codecs
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from support.toy import expected, expected_logprobs
from support.toy_service import EOS, TOKENIZER, VOCABULARY

from lineclear.client import FinishReason, Generation, Sampling
from lineclear.wire.messages import Sampling as WireSampling

ROUTES = ("generate", "session", "submit")
_STOPS_OF_NOTHING = ("\x00never", "zzzzzz")


@dataclass(frozen=True)
class Answer:
    """All of an answer that must be the same whatever happened on the way."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    matched_stop: str | int | None
    logprobs: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] = ()

    @classmethod
    def of(cls, got: Generation) -> Answer:
        """The same of an answer that came."""
        logprobs = tuple((e.logprob, tuple((t.token_id, t.logprob) for t in e.top_logprobs)) for e in got.logprobs)
        return cls(got.token_ids, got.text, got.finish_reason, got.matched_stop, logprobs)


@dataclass(frozen=True)
class Question:
    """A request, how it is asked, and its answer."""

    prompt: tuple[int, ...]
    sampling: Sampling
    right: Answer
    top_logprobs: int | None = None
    """How many to ask for; None: no log probabilities at all."""
    route: str = "generate"

    @property
    def params(self) -> dict[str, Any]:
        """What to ask besides `sampling`."""
        return {} if self.top_logprobs is None else {"logprobs": True, "top_logprobs": self.top_logprobs}


Ask = Callable[[], Question]


def toy_questions(seed: int, routes: Sequence[str] = ("generate",)) -> Ask:
    """Endlessly many, seeded, of many lengths; some begin alike. Safe to call from many threads."""
    numbers, lock = count(), threading.Lock()

    def ask() -> Question:
        with lock:
            number = next(numbers)
        dice = random.Random(seed << 32 | number)
        shared = [7 * (number % 3) + i for i in range(32)]
        prompt = (*shared, *(dice.randrange(VOCABULARY) for _ in range(dice.randrange(1, 60))))
        sampling = _parameters(dice, number)
        top_logprobs = dice.choice((None, None, 0, 3))
        sampling = sampling.replace(stop=_stop_strings(dice, prompt, sampling))
        right = toy_answer(prompt, sampling, top_logprobs)
        return Question(prompt, sampling, right, top_logprobs, dice.choice(routes))

    return ask


def _parameters(dice: random.Random, number: int) -> Sampling:
    """Some parameters away from their defaults, never all of them."""
    fields: dict[str, Any] = {}
    drawn: dict[str, Any] = {
        "temperature": dice.choice((0.0, 0.3, 0.7, 1.5)),
        "top_k": dice.choice((1, 20)),
        "top_p": dice.choice((0.5, 0.95)),
        "min_p": 0.05,
        "repetition_penalty": dice.choice((0.8, 1.2)),
        "presence_penalty": dice.choice((-0.5, 0.75)),
        "frequency_penalty": dice.choice((-0.25, 1.0)),
        "logit_bias": {dice.randrange(VOCABULARY): dice.choice((-3.0, 2.5)) for _ in range(2)},
        "allowed_token_ids": tuple(sorted(dice.sample(range(VOCABULARY), 200))),
        "banned_token_ids": tuple(sorted(dice.sample(range(VOCABULARY), 20))),
        "stop_token_ids": tuple(sorted(dice.sample(range(1, VOCABULARY), 3))),
        "min_tokens": dice.randrange(1, 20),
    }
    for name, value in drawn.items():
        if dice.random() < 0.3:
            fields[name] = value
    ignore_eos = dice.random() < 0.7
    return Sampling(seed=number, max_tokens=dice.randrange(20, 160), ignore_eos=ignore_eos, **fields)


def _stop_strings(dice: random.Random, prompt: Sequence[int], sampling: Sampling) -> tuple[str, ...] | None:
    """Sometimes a piece of the answer's own text among strings that never come."""
    if dice.random() < 0.6:
        return None
    text = toy_answer(prompt, sampling, None).text
    pieces = [text[i : i + dice.randrange(1, 5)] for i in (dice.randrange(max(1, len(text))) for _ in range(2))]
    found = [piece for piece in pieces if piece and "\ufffd" not in piece]
    return tuple(dict.fromkeys((*found, *_STOPS_OF_NOTHING)))


def toy_answer(prompt: Sequence[int], sampling: Sampling, top_logprobs: int | None) -> Answer:
    """What the service with a toy worker must answer."""
    wire = _on_the_wire(sampling, top_logprobs)
    assert sampling.max_tokens is not None
    tokens = expected(prompt, wire, sampling.max_tokens, VOCABULARY)
    characters = _characters(tokens, wire.stop_ids)
    text = "".join(character for character, _ in characters)
    reason, matched = FinishReason.LENGTH, None
    if tokens[-1] in wire.stop_ids and len(tokens) > wire.min_tokens:
        is_eos = tokens[-1] == EOS and not sampling.ignore_eos
        reason, matched = (FinishReason.STOP_EOS if is_eos else FinishReason.STOP_TOKEN), tokens[-1]
    stops = (sampling.stop,) if isinstance(sampling.stop, str) else sampling.stop or ()
    for end, (_, num_tokens) in enumerate(characters, 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found and num_tokens >= wire.min_tokens:
            stop = max(found, key=len)
            cut = end if sampling.include_stop_string else end - len(stop)
            return Answer(
                tuple(tokens[:num_tokens]),
                text[:cut],
                FinishReason.STOP_STRING,
                stop,
                _logprobs(prompt, tokens[:num_tokens], wire),
            )
    return Answer(tuple(tokens), text, reason, matched, _logprobs(prompt, tokens, wire))


def _logprobs(
    prompt: Sequence[int], tokens: Sequence[int], wire: WireSampling
) -> tuple[tuple[float, tuple[tuple[int, float], ...]], ...]:
    found = expected_logprobs(prompt, tokens, wire, VOCABULARY)
    return tuple((entry.logprob, entry.top) for entry in found if entry is not None)


def _on_the_wire(sampling: Sampling, top_logprobs: int | None) -> WireSampling:
    """What the worker must be given. The service's default of a temperature is 1."""
    s = sampling
    eos = () if s.ignore_eos else (EOS,)
    return WireSampling(
        temperature=1.0 if s.temperature is None else s.temperature,
        top_k=s.top_k or 0,
        top_p=1.0 if s.top_p is None else s.top_p,
        min_p=s.min_p or 0.0,
        repetition_penalty=1.0 if s.repetition_penalty is None else s.repetition_penalty,
        presence_penalty=s.presence_penalty or 0.0,
        frequency_penalty=s.frequency_penalty or 0.0,
        logit_bias=tuple((s.logit_bias or {}).items()),
        allowed_ids=tuple(s.allowed_token_ids or ()),
        banned_ids=tuple(s.banned_token_ids or ()),
        seed=s.seed or 0,
        min_tokens=s.min_tokens or 0,
        stop_ids=tuple(sorted({*eos, *(s.stop_token_ids or ())})),
        logprobs=-1 if top_logprobs is None else top_logprobs,
    )


def _characters(tokens: Sequence[int], silent_ids: Sequence[int]) -> list[tuple[str, int]]:
    """Every character of the text of `tokens`, and the number of tokens after which it is complete."""
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
