"""Seeded parameters of requests: combinations that mostly run, and a hostile value for any field of a message.

Hostile values follow the schema, so a new field is drawn without a change here.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import sampling_pb2

_FLOATS = (0.0, -0.0, 1.0, 0.5, -1.0, 1e-30, 1e30, 3.4e38, math.nan, math.inf, -math.inf, 0.009, 10.01)
_NUMBERS = (0, 1, 2, 3, 5, 20, 21, 33, 128, 129, 300, 511, 512, 4096, 100_001, 2**31 - 1, 2**31, 2**32 - 1, 2**64 - 1)
_SIGNED = (-(2**63), -(2**31), -2, -1, 0, 1, 5, 2**31 - 1, 2**63 - 1)
_DEEP = 200
_TEXTS = (
    *("", " ", "a", "the", "none", "\n", "\0", "\u00e9" * 40, "\U0001f600", "</think>", "x" * 65, "y" * 5000, "fuzz-1"),
    *("(a+)+$", "[", "(?=a)", "a{1,100000}", ".*" * 50, "\\d{1,3}", '{"type": "object"}', "{", "true", "[" * _DEEP),
    json.dumps({"$ref": "#"}),
    json.dumps({"type": "array", "items": {"$ref": "#"}, "minItems": 2**40}),
    json.dumps({"type": "string", "pattern": "(a|b)*c{1000,2000}"}),
    '{"properties": {"a": ' * _DEEP + "{}" + "}}" * _DEEP,
    *('start: "a" | start start', "start: start", 'start: "a"{1000000}', "start: /(/", "%json {}", "start: missing"),
)
_MOST_DEPTH = 4


def _schema(rng: random.Random) -> dict[str, Any]:
    kind = rng.choice(("integer", "boolean", "string", "null", "number"))
    return {"type": "object", "properties": {"a": {"type": kind}}, "required": ["a"], "additionalProperties": False}


_SAMPLING: tuple[Callable[[random.Random], dict[str, Any]], ...] = (
    lambda rng: {"n": rng.choice((1, 2, 5, 128))},
    lambda rng: {"best_of": rng.choice((1, 2, 4))},
    lambda rng: {"n": 2, "best_of": 3},
    lambda rng: {"num_beams": rng.choice((1, 2, 4, 32)), "length_penalty": rng.choice((-10.0, 0.0, 0.5, 10.0))},
    lambda rng: {"num_beams": 3, "n": 2, "early_stopping": rng.choice((0, 1, 2, 3))},
    lambda rng: {"temperature": rng.choice((0.0, 0.01, 1.0, 10.0)), "top_k": rng.choice((0, 1, 300, 512))},
    lambda rng: {"top_p": rng.choice((0.001, 0.5, 1.0)), "min_p": rng.choice((0.0, 0.5, 1.0))},
    lambda rng: {"typical_p": rng.choice((0.001, 0.5, 1.0)), "top_n_sigma": rng.choice((0.0, 1.0, 100.0))},
    lambda rng: {"xtc_probability": rng.choice((0.0, 0.5, 1.0)), "xtc_threshold": rng.choice((0.01, 0.5))},
    lambda rng: {"dynatemp_range": rng.choice((0.0, 0.5, 10.0)), "dynatemp_exponent": rng.choice((0.0, 1.0, 10.0))},
    lambda rng: {"dry_multiplier": rng.choice((0.8, 100.0)), "dry_base": 10.0, "dry_penalty_last_n": -1},
    lambda rng: {"dry_multiplier": 1.0, "dry_sequence_breakers": rng.choice((["none"], ["\n", ":"], ["e"], ["quick"]))},
    lambda rng: {"repetition_penalty": rng.choice((0.01, 1.3, 10.0)), "presence_penalty": 2.0},
    lambda rng: {"no_repeat_ngram_size": rng.choice((1, 2, 100)), "frequency_penalty": -2.0},
    lambda rng: {"bad_words": [rng.choice(("quick", "the fox", "a", "\u00e9", "\U0001f600"))]},
    lambda rng: {"allowed_token_ids": [5, 6, 7], "banned_token_ids": [rng.choice((5, 8))]},
    lambda rng: {"forced_first_token_id": 9, "begin_banned_token_ids": [rng.choice((5, 10))]},
    lambda rng: {"exponential_decay_start": 1, "exponential_decay_factor": rng.choice((1.0, 1.5, 10.0))},
    lambda rng: {"min_tokens": rng.choice((0, 1, 20)), "ignore_eos": rng.random() < 0.5},
    lambda rng: {"logit_bias": [{"token_id": 5, "bias": rng.choice((-100.0, 100.0))}]},
    lambda rng: {"structured_output": {"json_schema": json.dumps(_schema(rng))}},
    lambda rng: {"structured_output": {"json_object": True, "json_whitespace": rng.choice((0, 1, 2))}},
    lambda rng: {"structured_output": {"regex": "[a-z]{1,9}", "constraint_start": rng.choice(("a", "</think>"))}},
    lambda rng: {"structured_output": {"choice": {"texts": ["yes", "no"]}}},
    lambda rng: {"structured_output": {"grammar": 'start: "a" start | "b"'}},
)
_REQUEST: tuple[Callable[[random.Random], dict[str, Any]], ...] = (
    lambda rng: {"output": {"echo": True, "prompt_logprobs": rng.choice((0, 20))}},
    lambda rng: {"output": {"logprobs": True, "top_logprobs": rng.choice((0, 1, 20))}},
    lambda rng: {"output": {"omit_text": True, "token_timings": True, "queue_position": True}},
    lambda rng: {"output": {"keep_special_tokens": True, "echo": rng.random() < 0.5}},
    lambda rng: {"stop": {"strings": rng.choice((["a"], ["the", " "])), "include_stop_string": rng.random() < 0.5}},
    lambda rng: {"stop": {"regex": rng.choice(("[a-e]{3}", "(the|fox) ?[a-z]+", ".{40}#", "(a|b)*c"))}},
    lambda rng: {"stop": {"token_ids": [rng.randrange(512)], "eos_token_ids": [rng.randrange(512)]}},
    lambda rng: {"stop": {"repetition_detection": {"max_pattern_size": rng.choice((1, 20)), "min_count": 2}}},
    lambda rng: {"adapter": rng.choice(("", "none", "../x"))},
    lambda rng: {"truncate_prompt_tokens": rng.choice((1, 5, 2**31))},
    lambda rng: {"num_speculative_tokens": rng.choice((0, 1, 8, 2**32 - 1))},
    lambda rng: {"priority": rng.choice((0, 255)), "expected_tokens": rng.choice((1, 2**32 - 1))},
    lambda rng: {"cache_salt": rng.choice(("", "s", "\u00e9"))},
)


def add_plausible(request: pb.GenerateRequest, rng: random.Random) -> None:
    """Add up to four groups of parameters with values that are valid by themselves."""
    for _ in range(rng.randint(0, 2)):
        request.sampling.MergeFrom(sampling_pb2.SamplingParams(**rng.choice(_SAMPLING)(rng)))
    for _ in range(rng.randint(0, 2)):
        request.MergeFrom(pb.GenerateRequest(**rng.choice(_REQUEST)(rng)))


def add_hostile(message: Message, rng: random.Random, depth: int = 0) -> None:
    """Set a random field, or one inside a random field, to a value that may be out of range."""
    field = rng.choice(message.DESCRIPTOR.fields)
    if field.message_type is not None:
        if field.is_repeated:
            entries = getattr(message, field.name)
            for _ in range(rng.choice((1, 1, 2, 9, 200))):
                _fill(entries.add(), rng, depth + 1)
        else:
            _fill(getattr(message, field.name), rng, depth + 1)
    elif field.is_repeated:
        count = rng.choice((1, 1, 2, 9, 301, 4097))
        value = hostile_value(field, rng)
        getattr(message, field.name).extend([value] * count if rng.random() < 0.5 else _values(field, rng, count))
    else:
        setattr(message, field.name, hostile_value(field, rng))


def _fill(message: Message, rng: random.Random, depth: int) -> None:
    message.SetInParent()
    for _ in range(rng.choice((0, 1, 1, 2, 4)) if depth < _MOST_DEPTH and message.DESCRIPTOR.fields else 0):
        add_hostile(message, rng, depth)


def _values(field: FieldDescriptor, rng: random.Random, count: int) -> list[Any]:
    return [hostile_value(field, rng) for _ in range(min(count, 301))]


def hostile_value(field: FieldDescriptor, rng: random.Random) -> Any:
    """Return a value that the type of the field holds."""
    kind = field.cpp_type
    if kind in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return rng.choice(_FLOATS)
    if kind == field.CPPTYPE_BOOL:
        return rng.random() < 0.7
    if kind == field.CPPTYPE_STRING:
        text = rng.choice(_TEXTS)
        return text.encode() if field.type == field.TYPE_BYTES else text
    if kind == field.CPPTYPE_ENUM:
        return rng.choice((0, 1, 2, 3, 99, -1))
    bits = 32 if kind in (field.CPPTYPE_INT32, field.CPPTYPE_UINT32) else 64
    if kind in (field.CPPTYPE_INT32, field.CPPTYPE_INT64):
        return rng.choice([x for x in _SIGNED if -(2 ** (bits - 1)) <= x < 2 ** (bits - 1)])
    return rng.choice([x for x in _NUMBERS if x < 2**bits])
