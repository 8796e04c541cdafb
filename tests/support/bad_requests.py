"""Requests that must be rejected: name, request, the error's reason, and the paths of the invalid fields."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import sampling_pb2

CONTEXT, VOCABULARY, MAX_BYTES = 128, 512, 4096

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


def _sampling(name: str, value: Any, reason: str = INVALID, path: str = "") -> Bad:
    shown = f"{len(value)} entries" if isinstance(value, list) else repr(value)
    return Bad(f"{name}={shown}", request(sampling={name: value}), reason, (path or f"sampling.{name}",))


def _chat(*messages: tuple[str, str]) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(role=role, content=content) for role, content in messages])


def _bias(*entries: tuple[int, float]) -> dict[str, Any]:
    return {"logit_bias": [sampling_pb2.LogitBias(token_id=i, bias=b) for i, b in entries]}


def _paths(*names: str) -> tuple[str, ...]:
    return tuple(f"sampling.{name}" for name in names)


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
WHOLE_OUTSIDE = {
    "no_repeat_ngram_size": (101, 2**32 - 1),
    "exponential_decay_start": (100_001, 2**32 - 1),
    "dry_allowed_length": (0, 1001),
    "dry_penalty_last_n": (-2, 100_001),
}
HUGE_IDS = (VOCABULARY, VOCABULARY + 1, 2**31 - 1, 2**31, 2**32 - 1)


def _cases() -> Iterator[Bad]:
    for name, values in OUTSIDE.items():
        for value in (*NOT_FINITE, *values):
            yield _sampling(name, value)
    for name, numbers in WHOLE_OUTSIDE.items():
        for number in numbers:
            yield _sampling(name, number)
    for top_k in (VOCABULARY + 1, 2**31, 2**32 - 1):
        yield _sampling("top_k", top_k)
    yield _sampling("max_tokens", 0)
    for max_tokens in (CONTEXT, CONTEXT + 1, 2**31, 2**32 - 1):
        yield _sampling("max_tokens", max_tokens, TOO_LONG)
    for min_tokens in (CONTEXT + 1, 2**32 - 1):
        yield _sampling("min_tokens", min_tokens)
    yield Bad("min over max", request(sampling={"min_tokens": 5, "max_tokens": 4}), INVALID, ("sampling.min_tokens",))
    for path in ("allowed_token_ids", "banned_token_ids", "begin_banned_token_ids"):
        for token_id in HUGE_IDS:
            yield _sampling(path, [1, token_id], VOCAB, f"sampling.{path}[1]")
        yield _sampling(path, [1] * 4097)
    yield _sampling("banned_token_ids", list(range(VOCABULARY)))
    yield _sampling("begin_banned_token_ids", list(range(VOCABULARY)))
    for token_id in HUGE_IDS:
        yield _sampling("forced_first_token_id", token_id, VOCAB)
    for ban in ({"banned_token_ids": [5]}, {"begin_banned_token_ids": [5]}):
        fields = ("sampling.forced_first_token_id",)
        yield Bad(f"forced with {ban}", request(sampling={"forced_first_token_id": 5, **ban}), INVALID, fields)
    yield Bad(
        "forced to end before min_tokens",
        request(sampling={"forced_first_token_id": 9, "min_tokens": 1}, stop={"token_ids": [9]}),
        INVALID,
        ("sampling.forced_first_token_id",),
    )
    yield Bad(
        "everything allowed is banned at the beginning",
        request(sampling={"allowed_token_ids": [5, 6], "begin_banned_token_ids": [6, 5]}),
        INVALID,
        ("sampling.begin_banned_token_ids",),
    )
    for count in (257, 10_000):
        yield _sampling("bad_words", ["x"] * count)
    yield _sampling("dry_sequence_breakers", ["x"] * 17)
    for text in ("", "x" * 65):
        yield _sampling("dry_sequence_breakers", ["ok", text], path="sampling.dry_sequence_breakers[1]")
    for word in ("", "x" * 129, "é" * 65):
        yield _sampling("bad_words", ["ok", word], path="sampling.bad_words[1]")
    yield Bad(
        "everything allowed is banned",
        request(sampling={"allowed_token_ids": [5, 6], "banned_token_ids": [6, 5]}),
        INVALID,
        ("sampling.allowed_token_ids",),
    )
    yield Bad(
        "only stop tokens are allowed, before min_tokens",
        request(sampling={"allowed_token_ids": [1, 9], "min_tokens": 1}, stop={"token_ids": [9]}),
        INVALID,
        ("sampling.allowed_token_ids",),
    )
    yield Bad(
        "all but a stop token is banned, before min_tokens",
        request(sampling={"banned_token_ids": [i for i in range(VOCABULARY) if i != 1], "min_tokens": 1}),
        INVALID,
        ("sampling.banned_token_ids",),
    )
    for bias in (*NOT_FINITE, -100.01, 100.01, 1e30):
        yield Bad(
            f"bias={bias}", request(sampling=_bias((3, 1.0), (4, bias))), INVALID, ("sampling.logit_bias[1].bias",)
        )
    for token_id in HUGE_IDS:
        fields = ("sampling.logit_bias[0].token_id",)
        yield Bad(f"bias of {token_id}", request(sampling=_bias((token_id, 1.0))), VOCAB, fields)
    yield Bad("301 biases", request(sampling=_bias(*((i, 1.0) for i in range(301)))), INVALID, ("sampling.logit_bias",))
    yield Bad(
        "a bias twice", request(sampling=_bias((3, 1.0), (3, 2.0))), INVALID, ("sampling.logit_bias[1].token_id",)
    )
    # stop
    for token_id in HUGE_IDS:
        yield Bad(f"stop {token_id}", request(stop={"token_ids": [2, 3, token_id]}), VOCAB, ("stop.token_ids[2]",))
    for count in (17, 1000):
        yield Bad(f"{count} stop tokens", request(stop={"token_ids": [2] * count}), INVALID, ("stop.token_ids",))
    for token_id in HUGE_IDS:
        yield Bad(f"eos {token_id}", request(stop={"eos_token_ids": [2, token_id]}), VOCAB, ("stop.eos_token_ids[1]",))
    yield Bad("17 eos tokens", request(stop={"eos_token_ids": [2] * 17}), INVALID, ("stop.eos_token_ids",))
    yield Bad(
        "eos tokens to ignore",
        request(sampling={"ignore_eos": True}, stop={"eos_token_ids": [2]}),
        INVALID,
        ("stop.eos_token_ids",),
    )
    yield Bad(
        "only own eos tokens are allowed, before min_tokens",
        request(sampling={"allowed_token_ids": [9], "min_tokens": 1}, stop={"eos_token_ids": [9]}),
        INVALID,
        ("sampling.allowed_token_ids",),
    )
    yield Bad("expected_tokens=0", request(expected_tokens=0), INVALID, ("expected_tokens",))
    for count in (9, 10_000):
        yield Bad(f"{count} stops", request(stop={"strings": ["x"] * count}), INVALID, ("stop.strings",))
    for size, least, count, field in (
        (0, 1, 2, "max_pattern_size"), (129, 1, 2, "max_pattern_size"), (4, 0, 2, "min_pattern_size"),
        (4, 5, 2, "min_pattern_size"), (4, 1, 1, "min_count"), (4, 1, 1001, "min_count"),
    ):  # fmt: skip
        found = {"max_pattern_size": size, "min_pattern_size": least, "min_count": count}
        fields = (f"stop.repetition_detection.{field}",)
        yield Bad(f"repetition {found}", request(stop={"repetition_detection": found}), INVALID, fields)
    yield Bad("truncate to 0", request(truncate_prompt_tokens=0), INVALID, ("truncate_prompt_tokens",))
    for string in ("", "x" * 65, "é" * 33, "😀" * 17, "x" * 100_000):
        fields = ("stop.strings[1]",)
        yield Bad(f"stop of {len(string)}", request(stop={"strings": ["ok", string]}), INVALID, fields)
    # identity, priority, output
    for request_id in ("", "x" * 129, "a b", "a/b", "é", "a\n", "\n", "~", "a~1", "x" * 100_000, "a\x00", "{}", "a,b"):
        shown = request_id[:8].encode("unicode_escape").decode()
        yield Bad(f"id {shown}", request(request_id=request_id), INVALID, ("request_id",))
    yield Bad("cache_salt of 65", request(cache_salt="x" * 65), INVALID, ("cache_salt",))
    for priority in (256, 2**31, 2**32 - 1):
        yield Bad(f"priority={priority}", request(priority=priority), INVALID, ("priority",))
    for top in (21, 1000, 2**32 - 1):
        fields = ("output.top_logprobs",)
        yield Bad(f"top={top}", request(output={"logprobs": True, "top_logprobs": top}), INVALID, fields)
    yield Bad(
        "top without logprobs",
        request(output={"logprobs": False, "top_logprobs": 1}),
        INVALID,
        ("output.top_logprobs",),
    )
    for ids, sampling in (([1] * 129, {}), ([1], {"num_beams": 2, "temperature": 0})):
        bad = request(output={"logprob_token_ids": ids}, sampling=sampling)
        yield Bad(f"{len(ids)} logprob ids with {sampling}", bad, INVALID, ("output.logprob_token_ids",))
    bad = request(output={"logprob_token_ids": [0, HUGE_IDS[0]]})
    yield Bad("logprob id", bad, VOCAB, ("output.logprob_token_ids[1]",))
    bad = request(output={"logprobs": False, "logprob_token_ids": [1]})
    yield Bad("logprob ids without logprobs", bad, INVALID, ("output.logprob_token_ids",))
    # prompts
    yield Bad("no prompt", pb.GenerateRequest(), INVALID, ("prompt",))
    yield Bad("empty text", request(text=""), INVALID, ("text",))
    yield Bad("no ids", request(token_ids=pb.TokenIds()), INVALID, ("token_ids.ids",))
    for token_id in HUGE_IDS:
        ids = pb.TokenIds(ids=[0, 1, token_id, token_id])
        yield Bad(f"prompt id {token_id}", request(token_ids=ids), VOCAB, ("token_ids.ids[2]",))
    for count in (CONTEXT, CONTEXT + 1, 100_000):
        yield Bad(f"{count} ids", request(token_ids=pb.TokenIds(ids=[3] * count)), TOO_LONG, ("token_ids.ids",))
    for size in (MAX_BYTES + 1, 100_000):
        yield Bad(f"{size} bytes", request(text="x" * size), TOO_LONG, ("text",))
    yield Bad("wide bytes", request(text="😀" * (MAX_BYTES // 4 + 1)), TOO_LONG, ("text",))
    yield Bad("no messages", request(chat=pb.ChatMessages()), INVALID, ("chat.messages",))
    messages = _chat(("user", "x" * 2048), ("user", "x" * 2049))
    yield Bad("long chat", request(chat=messages), TOO_LONG, ("chat.messages",))
    yield Bad("many messages", request(chat=_chat(*[("user", "")] * 4097)), INVALID, ("chat.messages",))
    for role in ("", "a b", "<|im_start|>", "x" * 33, "é", "user\n", "user|>"):
        shown = role[:8].encode("unicode_escape").decode()
        fields = ("chat.messages[1].role",)
        yield Bad(f"role {shown}", request(chat=_chat(("user", "x"), (role, "y"))), INVALID, fields)
    # several invalid fields: the reason that all share, or the general one
    yield Bad(
        "two ids",
        request(sampling={"banned_token_ids": [VOCABULARY]}, stop={"token_ids": [VOCABULARY]}),
        VOCAB,
        ("sampling.banned_token_ids[0]", "stop.token_ids[0]"),
    )
    yield Bad(
        "two lengths",
        request(text="x" * (MAX_BYTES + 1), sampling={"max_tokens": CONTEXT}),
        TOO_LONG,
        ("text", "sampling.max_tokens"),
    )
    yield Bad(
        "a length and an id",
        request(text="x" * (MAX_BYTES + 1), stop={"token_ids": [VOCABULARY]}),
        INVALID,
        ("text", "stop.token_ids[0]"),
    )
    yield Bad("two floats", request(sampling={"top_p": math.nan, "min_p": math.inf}), INVALID, _paths("top_p", "min_p"))
    yield Bad(
        "empty text and top_k", request(text="", sampling={"top_k": 2**32 - 1}), INVALID, ("text", *_paths("top_k"))
    )
    yield Bad(
        "zero tokens, some required",
        request(sampling={"max_tokens": 0, "min_tokens": 1}),
        INVALID,
        _paths("max_tokens", "min_tokens"),
    )
    yield Bad(
        "all at once",
        pb.GenerateRequest(
            request_id="a b",
            chat=_chat(("", "x"), ("user", ""), ("\x00", "")),
            sampling=sampling_pb2.SamplingParams(
                temperature=math.nan, top_p=0.0, max_tokens=0, banned_token_ids=[9999], **_bias((9999, math.nan))
            ),
            stop=sampling_pb2.StopConditions(strings=["", "x"], token_ids=[9999]),
            priority=999,
            output=pb.OutputOptions(top_logprobs=99),
        ),
        INVALID,
        (
            "request_id",
            "chat.messages[0].role",
            "chat.messages[2].role",
            "sampling.temperature",
            "sampling.top_p",
            "sampling.max_tokens",
            "sampling.logit_bias[0].token_id",
            "sampling.logit_bias[0].bias",
            "sampling.banned_token_ids[0]",
            "stop.token_ids[0]",
            "stop.strings[0]",
            "output.top_logprobs",
            "priority",
        ),
    )


CASES = list(_cases())
