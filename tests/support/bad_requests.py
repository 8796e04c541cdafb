"""Requests that must be rejected: name, request, the error's reason, and the paths of the invalid fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from lineclear.v1 import inference_pb2 as pb

CONTEXT, VOCABULARY, MAX_BYTES, MAX_OUTPUTS = 128, 512, 4096, 2

INVALID, TOO_LONG, VOCAB = "INVALID_REQUEST", "PROMPT_TOO_LONG", "TOKEN_OUT_OF_VOCABULARY"


class Bad(NamedTuple):
    name: str
    request: pb.GenerateRequest
    reason: str
    fields: tuple[str, ...]


def request(**fields: Any) -> pb.GenerateRequest:
    if not fields.keys() & {"text", "token_ids", "chat"}:
        fields["text"] = "quick"
    return pb.GenerateRequest(**fields)


def _sampling(name: str, value: Any) -> Bad:
    shown = f"{len(value)} entries" if isinstance(value, list) else repr(value)
    return Bad(f"{name}={shown}", request(sampling={name: value}), INVALID, (f"sampling.{name}",))


def _chat(*messages: tuple[str, str]) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(role=role, content=content) for role, content in messages])


def _bias(*entries: tuple[int, float]) -> dict[str, Any]:
    return {"logit_bias": [{"token_id": token_id, "bias": bias} for token_id, bias in entries]}


def _repetitions(*triples: tuple[int, int, int]) -> dict[str, dict[str, Any]]:
    """Return requests by name, of the largest and the smallest pattern and the count."""
    names = ("max_pattern_size", "min_pattern_size", "min_count")
    found = [dict(zip(names, triple, strict=True)) for triple in triples]
    return {f"repetition {each}": {"stop": {"repetition_detection": each}} for each in found}


NOT_FINITE = (math.nan, math.inf, -math.inf)
OUTSIDE = {
    "temperature": (-1.0, -0.01, 0.0099, 0.001, 1e-30, 10.001, 1e30),
    "top_p": (0.0, -0.0, -0.5, -1e-9, 1.0001, 2.0, 1e30),
    "min_p": (-0.001, -1.0, 1.001, 2.0),
    "repetition_penalty": (0.0, -0.0, 0.0099, -1.0, 10.01, 1e30),
    "presence_penalty": (-2.001, 2.001, 100.0, -1e30),
    "frequency_penalty": (-2.001, 2.001, 100.0, -1e30),
    "exponential_decay_factor": (0.0, 0.999, 10.01),
    "typical_p": (0.0, -0.5, 1.0001),
    "top_n_sigma": (-0.01, 100.1),
    "xtc_probability": (-0.01, 1.001),
    "xtc_threshold": (0.0, -0.1, 0.501),
    "dynatemp_range": (-0.01, 10.01),
    "dynatemp_exponent": (-0.01, 10.01),
    "dry_multiplier": (-0.01, 100.1),
    "dry_base": (0.99, 10.01),
}
WHOLE_OUTSIDE: dict[str, tuple[Any, ...]] = {
    "n": (0, MAX_OUTPUTS + 1),
    "best_of": (MAX_OUTPUTS + 1,),
    "num_beams": (0, 33),
    "top_k": (VOCABULARY + 1, 2**31, 2**32 - 1),
    "max_tokens": (0,),
    "min_tokens": (CONTEXT + 1, 2**32 - 1),
    "allowed_token_ids": ([1] * 4097,),
    "banned_token_ids": ([1] * 4097, list(range(VOCABULARY))),
    "begin_banned_token_ids": ([1] * 4097, list(range(VOCABULARY))),
    "bad_words": (["x"] * 257, ["x"] * 10_000),
    "dry_sequence_breakers": (["x"] * 17,),
    "no_repeat_ngram_size": (101, 2**32 - 1),
    "exponential_decay_start": (100_001, 2**32 - 1),
    "dry_allowed_length": (0, 1001),
    "dry_penalty_last_n": (-2, 100_001),
}
HUGE_IDS = (VOCABULARY, VOCABULARY + 1, 2**31 - 1, 2**31, 2**32 - 1)


_REQUEST_IDS = ("", "x" * 129, "a b", "a/b", "é", "a\n", "\n", "~", "a~1", "x" * 100_000, "a\x00", "{}", "a,b")
_ROLES = ("", "a b", "<|im_start|>", "x" * 33, "é", "user\n", "user|>")
_INVALID: dict[str, dict[str, dict[str, Any]]] = {
    "sampling.min_tokens": {"min over max": {"sampling": {"min_tokens": 5, "max_tokens": 4}}},
    "sampling.forced_first_token_id": {
        "forced and banned": {"sampling": {"forced_first_token_id": 5, "banned_token_ids": [5]}},
        "forced and banned first": {"sampling": {"forced_first_token_id": 5, "begin_banned_token_ids": [5]}},
        "forced to end before min_tokens": {
            "sampling": {"forced_first_token_id": 9, "min_tokens": 1},
            "stop": {"token_ids": [9]},
        },
    },
    "sampling.begin_banned_token_ids": {
        "everything allowed is banned at the beginning": {
            "sampling": {"allowed_token_ids": [5, 6], "begin_banned_token_ids": [6, 5]}
        },
    },
    "sampling.allowed_token_ids": {
        "everything allowed is banned": {"sampling": {"allowed_token_ids": [5, 6], "banned_token_ids": [6, 5]}},
        "only stop tokens are allowed, before min_tokens": {
            "sampling": {"allowed_token_ids": [1, 9], "min_tokens": 1},
            "stop": {"token_ids": [9]},
        },
        "only own eos tokens are allowed, before min_tokens": {
            "sampling": {"allowed_token_ids": [9], "min_tokens": 1},
            "stop": {"eos_token_ids": [9]},
        },
    },
    "sampling.banned_token_ids": {
        "all but a stop token is banned, before min_tokens": {
            "sampling": {"banned_token_ids": [i for i in range(VOCABULARY) if i != 1], "min_tokens": 1}
        },
    },
    "sampling.bad_words[1]": {
        f"bad word of {len(word)}": {"sampling": {"bad_words": ["ok", word]}} for word in ("", "x" * 129, "é" * 65)
    },
    "sampling.dry_sequence_breakers[1]": {
        f"breaker of {len(text)}": {"sampling": {"dry_sequence_breakers": ["ok", text]}} for text in ("", "x" * 65)
    },
    "sampling.logit_bias[1].bias": {
        f"bias={bias}": {"sampling": _bias((3, 1.0), (4, bias))} for bias in (*NOT_FINITE, -100.01, 100.01, 1e30)
    },
    "sampling.logit_bias": {"301 biases": {"sampling": _bias(*((i, 1.0) for i in range(301)))}},
    "sampling.logit_bias[1].token_id": {"a bias twice": {"sampling": _bias((3, 1.0), (3, 2.0))}},
    "sampling.length_penalty": {
        "length penalty not a number": {"sampling": {"num_beams": 2, "length_penalty": math.nan}},
        "length penalty without beams": {"sampling": {"length_penalty": 2.0}},
    },
    "sampling.early_stopping": {"early stopping without beams": {"sampling": {"early_stopping": 1}}},
    "output.prompt_logprobs": {
        f"prompt logprobs with {name}": {"sampling": {name: 2}, "output": {"prompt_logprobs": 1}}
        for name in ("num_beams", "best_of")
    },
    "stop.token_ids": {f"{count} stop tokens": {"stop": {"token_ids": [2] * count}} for count in (17, 1000)},
    "stop.eos_token_ids": {
        "17 eos tokens": {"stop": {"eos_token_ids": [2] * 17}},
        "eos tokens to ignore": {"sampling": {"ignore_eos": True}, "stop": {"eos_token_ids": [2]}},
    },
    "stop.strings": {f"{count} stops": {"stop": {"strings": ["x"] * count}} for count in (9, 10_000)},
    "stop.strings[1]": {
        f"stop of {len(string)}": {"stop": {"strings": ["ok", string]}}
        for string in ("", "x" * 65, "é" * 33, "😀" * 17, "x" * 100_000)
    },
    "stop.repetition_detection.max_pattern_size": _repetitions((0, 1, 2), (129, 1, 2)),
    "stop.repetition_detection.min_pattern_size": _repetitions((4, 0, 2), (4, 5, 2)),
    "stop.repetition_detection.min_count": _repetitions((4, 1, 1), (4, 1, 1001)),
    "expected_tokens": {"expected_tokens=0": {"expected_tokens": 0}},
    "truncate_prompt_tokens": {"truncate to 0": {"truncate_prompt_tokens": 0}},
    "request_id": {f"id {text[:8]!r} of {len(text)}": {"request_id": text} for text in _REQUEST_IDS},
    "cache_salt": {"cache_salt of 65": {"cache_salt": "x" * 65}},
    "priority": {f"priority={priority}": {"priority": priority} for priority in (256, 2**31, 2**32 - 1)},
    "output.top_logprobs": {
        **{f"top={n}": {"output": {"logprobs": True, "top_logprobs": n}} for n in (21, 1000, 2**32 - 1)},
        "top without logprobs": {"output": {"logprobs": False, "top_logprobs": 1}},
    },
    "output.logprob_token_ids": {
        "129 logprob ids": {"output": {"logprob_token_ids": [1] * 129}},
        "logprob ids of beams": {"output": {"logprob_token_ids": [1]}, "sampling": {"num_beams": 2, "temperature": 0}},
        "logprob ids without logprobs": {"output": {"logprobs": False, "logprob_token_ids": [1]}},
    },
    "text": {"empty text": {"text": ""}},
    "token_ids.ids": {"no ids": {"token_ids": pb.TokenIds()}},
    "chat.messages": {
        "no messages": {"chat": pb.ChatMessages()},
        "many messages": {"chat": _chat(*[("user", "")] * 4097)},
    },
    "chat.messages[1].role": {f"role {role[:8]!r}": {"chat": _chat(("user", "x"), (role, "y"))} for role in _ROLES},
}
"""Requests by their invalid field and name."""
_LONG: dict[str, dict[str, dict[str, Any]]] = {
    "sampling.max_tokens": {
        f"max_tokens={count}": {"sampling": {"max_tokens": count}} for count in (CONTEXT, CONTEXT + 1, 2**31, 2**32 - 1)
    },
    "token_ids.ids": {
        f"{count} ids": {"token_ids": pb.TokenIds(ids=[3] * count)} for count in (CONTEXT, CONTEXT + 1, 100_000)
    },
    "text": {
        **{f"{size} bytes": {"text": "x" * size} for size in (MAX_BYTES + 1, 100_000)},
        "wide bytes": {"text": "😀" * (MAX_BYTES // 4 + 1)},
    },
    "chat.messages": {"long chat": {"chat": _chat(("user", "x" * 2048), ("user", "x" * 2049))}},
}
_OUTSIDE_VOCABULARY: dict[str, Callable[[int], dict[str, Any]]] = {
    "sampling.logit_bias[0].token_id": lambda token_id: {"sampling": _bias((token_id, 1.0))},
    "stop.token_ids[2]": lambda token_id: {"stop": {"token_ids": [2, 3, token_id]}},
    "stop.eos_token_ids[1]": lambda token_id: {"stop": {"eos_token_ids": [2, token_id]}},
    "token_ids.ids[2]": lambda token_id: {"token_ids": pb.TokenIds(ids=[0, 1, token_id, token_id])},
    "output.logprob_token_ids[1]": lambda token_id: {"output": {"logprob_token_ids": [0, token_id]}},
    **{
        f"sampling.{name}[1]": lambda token_id, name=name: {"sampling": {name: [1, token_id]}}  # type: ignore[misc]
        for name in ("allowed_token_ids", "banned_token_ids", "begin_banned_token_ids")
    },
    "sampling.forced_first_token_id": lambda token_id: {"sampling": {"forced_first_token_id": token_id}},
}


def _cases() -> Iterator[Bad]:
    for table, reason in ((_INVALID, INVALID), (_LONG, TOO_LONG)):
        for path, named in table.items():
            for name, fields in named.items():
                yield Bad(name, request(**fields), reason, (path,))
    for path, fields_of in _OUTSIDE_VOCABULARY.items():
        for token_id in HUGE_IDS:
            yield Bad(f"{path} {token_id}", request(**fields_of(token_id)), VOCAB, (path,))
    for name, values in OUTSIDE.items():
        for value in (*NOT_FINITE, *values):
            yield _sampling(name, value)
    for name, numbers in WHOLE_OUTSIDE.items():
        for number in numbers:
            yield _sampling(name, number)
    yield Bad("no prompt", pb.GenerateRequest(), INVALID, ("prompt",))
    yield from _several()


def _several() -> Iterator[Bad]:
    """Yield requests with several invalid fields: the reason is the one that all share, or the general one."""
    huge, ids = VOCABULARY, {"token_ids": [VOCABULARY]}
    text = "x" * (MAX_BYTES + 1)
    named: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
        "two ids": (
            VOCAB,
            {"sampling": {"banned_token_ids": [huge]}, "stop": ids},
            ("sampling.banned_token_ids[0]", "stop.token_ids[0]"),
        ),
        "two lengths": (
            TOO_LONG,
            {"text": text, "sampling": {"max_tokens": CONTEXT}},
            ("text", "sampling.max_tokens"),
        ),
        "a length and an id": (INVALID, {"text": text, "stop": ids}, ("text", "stop.token_ids[0]")),
        "two floats": (
            INVALID,
            {"sampling": {"top_p": math.nan, "min_p": math.inf}},
            ("sampling.top_p", "sampling.min_p"),
        ),
        "empty text and top_k": (INVALID, {"text": "", "sampling": {"top_k": 2**32 - 1}}, ("text", "sampling.top_k")),
        "zero tokens, some required": (
            INVALID,
            {"sampling": {"max_tokens": 0, "min_tokens": 1}},
            ("sampling.max_tokens", "sampling.min_tokens"),
        ),
    }
    for name, (reason, fields, paths) in named.items():
        yield Bad(name, request(**fields), reason, paths)
    yield Bad(
        "all at once",
        pb.GenerateRequest(
            request_id="a b",
            chat=_chat(("", "x"), ("user", ""), ("\x00", "")),
            sampling={
                "temperature": math.nan,
                "top_p": 0.0,
                "max_tokens": 0,
                "banned_token_ids": [9999],
                **_bias((9999, math.nan)),
            },
            stop={"strings": ["", "x"], "token_ids": [9999]},
            priority=999,
            output={"top_logprobs": 99},
        ),
        INVALID,
        (
            *("request_id", "chat.messages[0].role", "chat.messages[2].role", "sampling.temperature", "sampling.top_p"),
            *("sampling.max_tokens", "sampling.logit_bias[0].token_id", "sampling.logit_bias[0].bias"),
            *("sampling.banned_token_ids[0]", "stop.token_ids[0]", "stop.strings[0]", "output.top_logprobs"),
            "priority",
        ),
    )


CASES = list(_cases())
