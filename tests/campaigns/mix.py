"""Requests that combine constraints, outputs, beams, adapters, drafts, tools, scores and vectors at random.

The expected answers come from a second server that is not disturbed: without drafts, without the prefix cache, with one
step in flight, one request at a time. So the campaign also compares drafted tokens with those of plain decoding.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from campaigns.questions import ROUTES, Answer, AskMixed, Call, Question
from campaigns.server import Server
from support.adapter_folders import write_random_adapter
from support.schemas import BY_HAND
from support.tool_templates import HERMES, TOOLS

from lineclear.client import Client, FinishReason, Generation, Sampling
from lineclear.errors import NonFiniteLogits, NoTokenAllowed

FEATURES = (
    *("plain", "sampled", "penalties", "repetition", "truncation", "ends", "logprobs", "prompt_logprobs"),
    *("constraint", "outputs", "best_of", "beams", "adapter", "tools", "score", "embed"),
)
"""What a request may have. A campaign in which one of them never occurs proves nothing about it."""

_SENTENCES = (
    "The capital of France is Paris, and the capital of Italy is",
    "Today's weather is so nice that the fox and the crow",
    "Once upon a time in a land far away, a ship left the harbour.",
    "Quantum computing differs from classical computing because",
    "The history of the Roman Empire began with a small town.",
    "My favourite food is bread, and the colour of the sea is",
)
_ADAPTERS = ("first", "second")
_CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"a": [0-9]{1,4}, "b": [0-9]{1,4}\}\}\n</tool_call>'
_TABLE = 'start: row+\nrow: NAME "=" NUMBER ";"\nNAME: /[a-z]{1,6}/\nNUMBER: /[0-9]{1,3}/'
_PENALTIES: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"dry_multiplier": 1.5, "dry_allowed_length": 2, "dry_sequence_breakers": ["."]},
)
_REPETITION: tuple[dict[str, Any], ...] = (
    {"no_repeat_ngram_size": 3},
    {"bad_words": ["the", " and", "of the"]},
    {"repetition_detection": {"max_pattern_size": 12, "min_count": 3}},
)
_TRUNCATION: tuple[dict[str, Any], ...] = (
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"typical_p": 0.7, "top_n_sigma": 2.0},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"dynatemp_range": 0.3},
)
_ENDS: tuple[dict[str, Any], ...] = (
    {"exponential_decay_start": 8, "exponential_decay_factor": 1.05, "ignore_eos": False},
    {"min_tokens": 12, "ignore_eos": False},
    {"begin_banned_token_ids": list(range(300, 600))},
    {"forced_first_token_id": 77},
)


def prepare(folder: Path, model: Path) -> tuple[Path, list[str]]:
    """Make a model with a chat template for tools, and two adapters. Return the model and the server's flags."""
    copy = folder / "model"
    copy.mkdir()
    for path in model.iterdir():
        if path.name != "chat_template.jinja":
            (copy / path.name).symlink_to(path.resolve())
    (copy / "chat_template.jinja").write_text(HERMES)
    paths = [write_random_adapter(folder / name, model, seed) for seed, name in enumerate(_ADAPTERS)]
    return copy, ["--lora-modules", ",".join(f"{path.name}={path}" for path in paths)]


def mixed_questions(target: str, server: Server, num: int, seed: int, token: str) -> AskMixed:
    """Return `num` questions whose answers `server` gives beforehand, one at a time, and end it.

    With twice as many questions as features, each feature is in one of them; there may then be more than `num`.
    """
    server.wait_for("worker_joined")
    rng = random.Random(seed)
    known: list[Question | Call] = []
    with Client(target, token=token) as client:
        texts = [_continued(client, text) for text in _SENTENCES]
        wanted = set(FEATURES) if num >= 2 * len(FEATURES) else set()
        while len(known) < num or not wanted <= {name for entry in known for name in entry.features}:
            known.append(_drawn(rng, client, texts, len(known)))
    server.stop(signal.SIGTERM)
    lock, order = threading.Lock(), list[Question | Call]()

    def ask() -> Question | Call:
        with lock:
            if not order:
                order.extend(rng.sample(known, len(known)))
            question, route = order.pop(), rng.choice(ROUTES)
        return question if isinstance(question, Call) else replace(question, route=route)

    return ask


def _continued(client: Client, text: str) -> tuple[int, ...]:
    """Return the tokens of `text` and what the model writes behind it, so that the model repeats them."""
    prompt = client.tokenize(text)
    return (*prompt, *client.generate(prompt, temperature=0.0, max_tokens=40, ignore_eos=True).token_ids)


def _drawn(rng: random.Random, client: Client, texts: Sequence[tuple[int, ...]], number: int) -> Question | Call:
    while True:
        kind = rng.random()
        if kind < 0.08:
            return _score(rng, client, texts)
        if kind < 0.16:
            return _embed(rng, client, texts)
        question = _question(rng, texts, number)
        try:
            return _answered(rng, client, question)
        except (NoTokenAllowed, NonFiniteLogits):
            continue  # the drawn parameters contradict each other


def _prompt(rng: random.Random, texts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return a prompt with a common beginning, random words and repetitions, which drafts are made of."""
    first, second = rng.choice(texts), rng.choice(texts)
    noise = tuple(rng.randrange(300, 4000) for _ in range(rng.choice((0, 0, 4, 20))))
    return (*texts[0] * rng.randrange(2), *noise, *first, *second, *first, *second[: rng.randrange(4, 20)])[-240:]


def _question(rng: random.Random, texts: Sequence[tuple[int, ...]], number: int) -> Question:
    features, prompt = [], _prompt(rng, texts)
    fields: dict[str, Any] = {"max_tokens": rng.randrange(24, 96), "ignore_eos": True, "temperature": 0.0}
    more: dict[str, Any] = {}

    def has(name: str, probability: float) -> bool:
        chosen = rng.random() < probability
        features.extend([name] * chosen)
        return chosen

    if has("adapter", 0.4):
        more["adapter"] = rng.choice(_ADAPTERS)
    if has("beams", 0.1):
        beams = rng.randrange(2, 5)
        fields |= {"num_beams": beams, "n": rng.randrange(1, beams + 1), "length_penalty": rng.choice((0.6, 1.0))}
        fields |= {"max_tokens": rng.randrange(6, 16), "ignore_eos": False}
        return Question(prompt, Sampling(**fields), _NONE, more=more, features=tuple(features))
    if has("sampled", 0.5):
        fields |= {"temperature": rng.choice((0.7, 1.0)), "seed": number}
    for name, changes in (("penalties", _PENALTIES), ("repetition", _REPETITION), ("ends", _ENDS)):
        fields |= rng.choice(changes) if has(name, 0.15) else {}
    fields |= rng.choice(_TRUNCATION) if "sampled" in features and has("truncation", 0.4) else {}
    if "forced_first_token_id" in fields:
        pass  # refused with a form
    elif has("constraint", 0.4):
        fields |= _form(rng) | {"ignore_eos": False}
    elif has("tools", 0.12):
        return _tool_question(rng, fields, more, features)
    if "sampled" in features and has("best_of", 0.12):
        fields |= {"n": rng.randrange(1, 3), "best_of": rng.randrange(3, 5)}
    elif "sampled" in features and has("outputs", 0.4):
        fields |= {"n": rng.randrange(2, 5)}
    top = rng.randrange(4) if has("logprobs", 0.4) else None
    if "best_of" not in features and has("prompt_logprobs", 0.12):
        more["prompt_logprobs"] = rng.randrange(3)
    return Question(prompt, Sampling(**fields), _NONE, top, more=more, features=tuple(features or ["plain"]))


def _form(rng: random.Random) -> dict[str, Any]:
    forms: tuple[dict[str, Any], ...] = (
        {"json_schema": rng.choice(BY_HAND), "json_whitespace": rng.choice(("compact", "any"))},
        {"json_schema": rng.choice(BY_HAND)},
        {"regex": rng.choice(("[a-f]{10,30}x", "(19|20)[0-9]{2}-[0-9]{2}", "([A-Z][a-z]{2,8} ){3,9}!"))},
        {"choice": ["yes", "no", "perhaps, as the sea is deep"]},
        {"grammar": _TABLE},
        {"choice": ["up", "down"], "constraint_start": "."},
    )
    return rng.choice(forms)


def _tool_question(rng: random.Random, fields: dict[str, Any], more: dict[str, Any], features: list[str]) -> Question:
    """Return a conversation in which the answer is forced to be text and a call."""
    messages = ({"role": "user", "content": rng.choice(_SENTENCES)},)
    # The seed is a part of the ids of calls.
    form = {"regex": f"[a-z ]{{0,12}}{_CALL}", "ignore_eos": False, "max_tokens": 90, "seed": 5}
    return Question(messages, Sampling(**fields | form), _NONE, more={**more, "tools": TOOLS}, features=tuple(features))


def _answered(rng: random.Random, client: Client, question: Question) -> Question:
    """Return the question with its answer, sometimes with a stop string from that answer."""
    right, *others = Answer.all_of(_asked(client, question))
    if len(right.text) > 40 and not {"beams", "tools"} & set(question.features) and rng.random() < 0.2:
        at = rng.randrange(20, len(right.text) - 4)
        question = replace(question, sampling=question.sampling.replace(stop=right.text[at : at + 4]))
        right, *others = Answer.all_of(_asked(client, question))
    return replace(question, right=right, others=tuple(others))


def _asked(client: Client, question: Question) -> Generation:
    return client.generate(list(question.prompt), question.sampling, **question.params)


def _score(rng: random.Random, client: Client, texts: Sequence[tuple[int, ...]]) -> Call:
    prompt = list(_prompt(rng, texts))
    continuations = [list(rng.choice(texts)[: rng.randrange(1, 12)]) for _ in range(rng.randrange(1, 5))]

    def ask(client: Client) -> tuple[float, ...]:
        found = client.score(prompt, continuations, top_logprobs=1)
        entries = [entry for score in found.scores for entry in score.logprobs]
        return tuple(value for entry in entries for value in (entry.logprob, entry.top_logprobs[0].token_id))

    return Call(ask, ask(client), "score", ("score",))


def _embed(rng: random.Random, client: Client, texts: Sequence[tuple[int, ...]]) -> Call:
    inputs = [list(_prompt(rng, texts)) for _ in range(rng.randrange(1, 5))]
    pooling: Any = rng.choice(("last_token", "mean"))

    def ask(client: Client) -> tuple[float, ...]:
        return tuple(value for vector in client.embed(inputs, pooling=pooling).vectors for value in vector)

    return Call(ask, ask(client), "embed", ("embed",))


_NONE = Answer((), "", FinishReason.UNSPECIFIED, None)
