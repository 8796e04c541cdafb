"""Messages survive the wire; other bytes are rejected quickly, and by DecodeError only."""

from __future__ import annotations

import contextlib
import math
import random
import struct
import typing
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.damage import HEADER_BYTES, damaged_payload, mutate, resealed
from support.examples import EXAMPLES
from support.work import count_calls
from wire.messages import BY_TYPE

from lineclear.wire import codec, sampling_codec
from lineclear.wire.codec import DecodeError, ProtocolMismatch, decode, encode
from lineclear.wire.messages import (
    PROTOCOL,
    Logprobs,
    Message,
    Row,
    RowOutput,
    Sampling,
    SlotInit,
    StepPlan,
    StepResult,
)
from lineclear.wire.sampling import LISTS


def test_every_type_has_an_example_and_a_strategy() -> None:
    types = set(typing.get_args(Message))
    assert {type(example) for example in EXAMPLES} == types
    assert set(BY_TYPE) == types


@pytest.mark.parametrize("kind", BY_TYPE, ids=lambda kind: kind.__name__)
@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_message_survives(kind: type, data: st.DataObject) -> None:
    message = data.draw(BY_TYPE[kind])
    assert decode(encode(message)) == message


def test_logprob_of_an_invalid_token_may_be_nan() -> None:
    result = StepResult(1, 1, (0,), (Logprobs(math.nan),), frozenset({0}))
    back = decode(encode(result))
    assert isinstance(back, StepResult)
    assert back.logprobs[0] is not None
    assert math.isnan(back.logprobs[0].logprob)


def test_a_frame_without_a_header_is_refused() -> None:
    for size in (0, 1, HEADER_BYTES - 1):
        with pytest.raises(DecodeError, match="shorter"):
            decode(encode(EXAMPLES[0])[:size])
    with pytest.raises(DecodeError, match="not a lineclear frame"):
        decode(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda m: type(m).__name__)
def test_a_flipped_bit_is_refused_wherever_it_is(example: Message) -> None:
    """Also in the header: the receiver would accept a result of another step, or an error as a result."""
    frame = encode(example)
    for place in range(min(len(frame), 128) * 8):
        damaged = bytearray(frame)
        damaged[place // 8] ^= 1 << place % 8
        with pytest.raises(DecodeError):
            decode(bytes(damaged))


def test_another_protocol_is_refused_and_named() -> None:
    frame = bytearray(encode(EXAMPLES[5]))
    frame[4:6] = struct.pack("<H", PROTOCOL + 1)
    with pytest.raises(ProtocolMismatch) as caught:
        decode(bytes(frame))
    assert caught.value.theirs == PROTOCOL + 1
    assert str(PROTOCOL + 1) in str(caught.value)


def test_an_unknown_kind_is_refused() -> None:
    frame = bytearray(encode(EXAMPLES[5]))
    frame[6:8] = struct.pack("<H", 99)
    with pytest.raises(DecodeError, match="unknown kind 99"):
        decode(resealed(bytes(frame), bytes(frame[HEADER_BYTES:])))


PLAN, RESULT, HELLO, *_ = EXAMPLES
pb = codec.pb
INTS = struct.Struct("<2i").pack
SCALARS = sampling_codec.to_message(Sampling()).scalars
BAD_LISTS = b"123", INTS(1, -1)[:4], INTS(-1, 3)[:4]


def _plan_of(sampling: Any) -> Any:
    return pb.Plan(inits=[pb.SlotInit(tokens=INTS(1, 2), prompt_len=1, sampling=sampling)])


I0, I1, NEGATIVE = (struct.pack("<i", value) for value in (0, 1, -1))


def hello(**fields: Any) -> Any:
    sizes = ("num_blocks", "block_size", "num_slots", "max_model_len", "vocab_size", "max_step_tokens")
    return pb.Hello(**dict.fromkeys(sizes, 1), **fields)


def outputs(*, bad_rows: bytes = b"", **columns: Any) -> Any:
    return pb.Result(bad_rows=bad_rows, outputs=pb.Outputs(**columns))


@pytest.mark.parametrize(
    ("example", "payload"),
    [
        (PLAN, pb.Plan(slots=b"123")),  # no whole number of integers
        (PLAN, pb.Plan(slots=INTS(1, 2))),  # one column only
        (PLAN, pb.Plan(slots=INTS(0, 1), starts=INTS(0, 0), counts=INTS(1, 1), outputs=b"\1\1")),  # no block counts
        (PLAN, pb.Plan(num_new_blocks=INTS(1, 0))),  # more blocks promised than sent
        (PLAN, pb.Plan(num_new_blocks=INTS(2, -2))),  # the sum is right, the parts are not
        (PLAN, _plan_of(pb.Sampling())),  # no scalars
        (PLAN, _plan_of(pb.Sampling(scalars=SCALARS + b"0"))),
        (PLAN, _plan_of(pb.Sampling(scalars=SCALARS, lists=[b""]))),  # one list of many
        *((PLAN, _plan_of(pb.Sampling(scalars=SCALARS, lists=[bad] * len(LISTS)))) for bad in BAD_LISTS),
        (PLAN, pb.Plan(copy_sources=INTS(1, 2), copy_targets=INTS(3, 4))),  # blocks without positions
        (PLAN, pb.Plan(copy_sources=INTS(1, 2), copy_targets=INTS(3, 4), copy_positions=INTS(1, 0))),  # none to copy
        (PLAN, pb.Plan(copy_sources=INTS(1, -2), copy_targets=INTS(3, 4), copy_positions=INTS(1, 1))),
        (PLAN, pb.Plan(state_sources=INTS(1, 2), state_targets=I1)),  # a copy without a target
        (PLAN, pb.Plan(state_sources=I1, state_targets=NEGATIVE)),
        (PLAN, pb.Plan(slots=I1, starts=I1, counts=I1, outputs=b"\1", num_new_blocks=I0, num_drafts=NEGATIVE)),
        (PLAN, pb.Plan(slots=I1, starts=I1, counts=I1, outputs=b"\1", num_new_blocks=I0, num_drafts=INTS(0, 0))),
        (RESULT, outputs(num_drafted=NEGATIVE)),
        (RESULT, pb.Result(tokens=INTS(1, 2), bad_rows=INTS(0, 2))),  # a bad row that is not there
        (RESULT, pb.Result(tokens=INTS(1, 2), bad_rows=INTS(0, -1))),
        (RESULT, pb.Result(tokens=INTS(1, 2), logprobs=b"\0\0\0\0", num_top=b"\0\0\0\0")),  # one logprob, two tokens
        (RESULT, pb.Result(tokens=INTS(1, 2), logprobs=b"\0" * 8)),  # no counts
        (PLAN, pb.Plan(slots=I1, starts=I1, counts=I1, outputs=b"\4", num_new_blocks=b"\0" * 4)),  # an unknown output
        (PLAN, pb.Plan(inits=[pb.SlotInit(slot=1, tokens=I1, prompt_len=1, pooling=pb.Pooling())])),  # no kind
        (PLAN, pb.Plan(inits=[pb.SlotInit(slot=1, tokens=I1, prompt_len=1, num_top_scores=-1)])),
        (RESULT, pb.Result(tokens=INTS(1, 2), outputs=pb.Outputs(counts=I1))),  # one token counted, two sent
        (RESULT, pb.Result(tokens=INTS(1, 2), outputs=pb.Outputs(counts=INTS(3, -1)))),
        (RESULT, outputs(score_counts=INTS(1, 1), num_top=INTS(0, 0), scores=I1)),  # a score is missing
        (RESULT, outputs(score_counts=I1, num_top=I1, scores=I1)),  # no top score
        (RESULT, outputs(bad_rows=I1, score_counts=I1, num_top=I0, scores=I1)),  # a bad row that is not there
        (RESULT, outputs(vectors=[b"123"])),  # no whole number of values
        (HELLO, pb.Hello()),  # no capacity at all
        (HELLO, hello(num_swap_blocks=-1)),
        (HELLO, hello(has_recurrent_state=True, num_state_snapshots=-1)),
        (HELLO, hello(swap_seconds=math.inf)),
        (HELLO, hello(swap_seconds=math.nan)),
        (HELLO, hello(load_seconds=-1.0)),
        (HELLO, hello(load_seconds=math.inf)),
        (EXAMPLES[4], pb.StepError()),  # no kind
        (EXAMPLES[-1], pb.SetLogLevel()),  # no level
        (EXAMPLES[-1], pb.SetLogLevel(level=5)),  # type: ignore[arg-type]  # none that is known
    ],
)
def test_columns_that_disagree_are_refused(example: Message, payload: typing.Any) -> None:
    with pytest.raises(DecodeError, match="payload of kind"):
        decode(resealed(encode(example), payload.SerializeToString()))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda m: type(m).__name__)
def test_a_mutated_frame_is_refused_or_read_and_never_worse(example: Message) -> None:
    """A thousand mutations of each kind; three of four get a right checksum, or none would reach the payload.

    What decodes must encode again: the decoder never makes a message that the types do not allow. No mutation costs
    more than the frame itself and the error.
    """
    dice = random.Random(repr(example))
    frame = encode(example)
    most = count_calls(lambda: decode(frame)) + 8
    refused = 0
    for i in range(1000):
        mutated = damaged_payload(frame, dice) if i % 4 else mutate(frame, dice)
        read: list[Message] = []

        def attempt(mutated: bytes = mutated, read: list[Message] = read) -> None:
            with contextlib.suppress(DecodeError):
                read.append(decode(mutated))

        assert count_calls(attempt) <= most
        refused += not read
        for message in read:
            encode(message)
    assert refused > 0
    assert refused < 1000


@pytest.mark.parametrize("values", [(1, 5), (1, 1), (-1,), (-1, 3), (2, 1), (2, -1, 3, 4), (0, 7)])
def test_sequences_and_lengths_that_disagree_are_refused(values: tuple[int, ...]) -> None:
    """The number of sequences, their lengths, and all ids."""
    data = struct.pack(f"<{len(values)}i", *values)
    lists = [data if name == "bad_words" else b"" for name in LISTS]
    with pytest.raises(DecodeError, match="payload of kind"):
        decode(resealed(encode(PLAN), _plan_of(pb.Sampling(scalars=SCALARS, lists=lists)).SerializeToString()))


def test_a_nested_payload_does_not_exhaust_the_stack() -> None:
    """Nest 100,000 groups; protobuf stops at its depth limit."""
    begin_group = b"\xfb\x01"
    with pytest.raises(DecodeError):
        decode(resealed(encode(PLAN), begin_group * 100_000))


def full_step(count: int) -> StepPlan:
    """`count` decode rows and a prefill of 8 tokens for each."""
    rows = tuple(Row(slot, 500 + slot, 1, RowOutput.SAMPLE, (slot,) if slot % 16 == 0 else ()) for slot in range(count))
    prompt = tuple(range(8 * count))
    last = Row(count, 0, len(prompt), RowOutput.SAMPLE, tuple(range(count // 2)))
    return StepPlan(3, 9, (*rows, last), (SlotInit(count, prompt, len(prompt), (), Sampling()),))


def test_encoding_a_step_takes_columns_and_not_rows() -> None:
    small, large = full_step(1), full_step(256)
    assert count_calls(lambda: encode(large)) == count_calls(lambda: encode(small)) < 100


def test_decoding_a_step_takes_a_few_calls_a_row() -> None:
    """256 decode rows and a prefill of 2,048 tokens: a Row for each, nothing for each token."""
    plan = full_step(256)
    frame = encode(plan)
    assert decode(frame) == plan
    assert len(frame) < 16_000
    assert count_calls(lambda: decode(frame)) < 4 * 256 + 200
