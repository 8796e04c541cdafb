"""Messages to bytes and back. Any bytes give a Message or a DecodeError, never anything else, and never run code.

A frame is a fixed header (magic, protocol, kind, epoch, step, CRC-32 of all the rest) and a protobuf payload whose bulk
is columns of little-endian integers.
"""

from __future__ import annotations

import struct
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from enum import Enum
from itertools import accumulate, chain
from math import inf
from typing import Any, TypeVar, get_type_hints

from google.protobuf.message import DecodeError as ProtobufDecodeError
from google.protobuf.message import Message as ProtobufMessage

from lineclear.wire import sampling_codec
from lineclear.wire.messages import (
    PROTOCOL,
    AdapterLoaded,
    BlockCopy,
    Decodes,
    Goodbye,
    Heartbeat,
    Hello,
    LoadAdapter,
    Logprobs,
    Message,
    Pooling,
    PoolingKind,
    PrepareGrammar,
    Profile,
    Profiled,
    Rejoin,
    Row,
    RowOutput,
    Scores,
    SetLogLevel,
    SlotInit,
    StateCopy,
    StepError,
    StepPlan,
    StepResult,
    Stopping,
    UnloadAdapter,
)
from lineclear.wire.v1 import step_pb2 as pb

_FIELDS = struct.Struct("<4sHHQQ")  # magic, protocol, kind, epoch, step
_HEADER = struct.Struct(_FIELDS.format + "I")  # and crc
_MAGIC = b"lncl"
_OUTPUTS = tuple(RowOutput)
_T = TypeVar("_T")


class DecodeError(ValueError):
    """The bytes are no message of this protocol."""


class ProtocolMismatch(DecodeError):
    """The other end speaks another version of the protocol; `theirs` says which."""

    def __init__(self, theirs: int) -> None:
        super().__init__(f"the other process speaks plan protocol {theirs}, this one {PROTOCOL}")
        self.theirs = theirs


def encode(message: Message) -> bytes:
    kind, to_payload, _ = _KINDS[type(message)]
    payload = to_payload(message).SerializeToString()
    step = getattr(message, "step", 0)
    fields = _FIELDS.pack(_MAGIC, PROTOCOL, kind, message.epoch, step)
    return fields + _checksum(fields, payload).to_bytes(4, "little") + payload


def _checksum(fields: bytes, payload: bytes) -> int:
    """Of the whole frame: a step or an epoch of another number would be believed."""
    return zlib.crc32(payload, zlib.crc32(fields))


def decode(frame: bytes) -> Message:
    """The message in a frame. Raises DecodeError for anything else (ProtocolMismatch for another version)."""
    if len(frame) < _HEADER.size:
        raise DecodeError("frame shorter than its header")
    magic, protocol, kind, epoch, step, crc = _HEADER.unpack_from(frame)
    if magic != _MAGIC:
        raise DecodeError("not a lineclear frame")
    if protocol != PROTOCOL:
        raise ProtocolMismatch(protocol)
    payload = frame[_HEADER.size :]
    if _checksum(frame[: _FIELDS.size], payload) != crc:
        raise DecodeError("checksum does not match")
    if kind not in _DECODERS:
        raise DecodeError(f"unknown kind {kind}")
    try:
        return _DECODERS[kind](epoch, step, payload)
    except (ProtobufDecodeError, ValueError, OverflowError) as error:
        raise DecodeError(f"payload of kind {kind}: {error}") from error


# --- columns ---------------------------------------------------------------------------------------------------------


def _ints(values: Iterable[int]) -> bytes:
    return _little(array("i", values))


def _floats(values: Iterable[float]) -> bytes:
    return _little(array("f", values))


def _little(column: array[Any]) -> bytes:
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _read(typecode: str, data: bytes) -> list[Any]:
    column: array[Any] = array(typecode)
    column.frombytes(data)  # ValueError when the length is no multiple of four
    if sys.byteorder == "big":
        column.byteswap()
    return column.tolist()


def _read_ints(data: bytes) -> list[int]:
    return _read("i", data)


def _read_indices(data: bytes) -> list[int]:
    """Slots, positions, blocks and the like. Raises ValueError for a negative one."""
    values = _read_ints(data)
    if values and min(values) < 0:
        raise ValueError("a negative index")
    return values


def _read_floats(data: bytes) -> list[float]:
    return _read("f", data)


def _split(values: Sequence[_T], lengths: Sequence[int]) -> list[tuple[_T, ...]]:
    """`values` cut into consecutive pieces of `lengths`. Raises ValueError unless they cover it exactly."""
    if min(lengths, default=0) < 0 or sum(lengths) != len(values):
        raise ValueError("columns disagree")
    ends = list(accumulate(lengths))
    return [tuple(values[end - n : end]) for n, end in zip(lengths, ends, strict=True)]


# --- plan and result -------------------------------------------------------------------------------------------------


def _plan_to(plan: StepPlan) -> pb.Plan:
    decodes = plan.decodes
    message = pb.Plan(
        inits=[_init_to(i) for i in plan.inits],
        zero_blocks=_ints(plan.zero_blocks),
        decode_slots=_ints(decodes.slots),
        decode_starts=_ints(decodes.starts),
    )
    if decodes.new_blocks:
        grown_slots, grown_blocks = zip(*decodes.new_blocks, strict=True)
        message.grown_slots, message.grown_blocks = _ints(grown_slots), _ints(grown_blocks)
    if plan.copy_blocks:
        sources, targets, lengths = zip(*plan.copy_blocks, strict=True)
        message.copy_sources, message.copy_targets = _ints(sources), _ints(targets)
        message.copy_positions = _ints(lengths)
    if plan.copy_states:
        sources, targets = zip(*plan.copy_states, strict=True)
        message.state_sources, message.state_targets = _ints(sources), _ints(targets)
    if plan.chunks:
        slots, starts, counts, outputs, blocks, drafts = zip(*plan.chunks, strict=True)
        message.slots, message.starts, message.counts = _ints(slots), _ints(starts), _ints(counts)
        message.outputs = bytes(outputs)
        message.new_blocks, message.num_new_blocks = _ints(chain.from_iterable(blocks)), _ints(map(len, blocks))
        if any(drafts):
            message.num_drafts = _ints(drafts)
    return message


def _plan_from(epoch: int, step: int, payload: bytes) -> StepPlan:
    m = pb.Plan.FromString(payload)
    inits = tuple(map(_init_from, m.inits))
    zero_blocks = tuple(_read_indices(m.zero_blocks))
    states = zip(_read_indices(m.state_sources), _read_indices(m.state_targets), strict=True)
    copies = _copies_from(m), tuple(map(StateCopy._make, states))
    return StepPlan(epoch, step, _chunks_from(m), inits, zero_blocks, _decodes_from(m), *copies)


def _copies_from(m: pb.Plan) -> tuple[BlockCopy, ...]:
    if not (m.copy_sources or m.copy_targets or m.copy_positions):
        return ()
    columns = _read_indices(m.copy_sources), _read_indices(m.copy_targets), _read_indices(m.copy_positions)
    if 0 in columns[2]:
        raise ValueError("a copy of no positions")
    return tuple(BlockCopy(*copy) for copy in zip(*columns, strict=True))


def _decodes_from(m: pb.Plan) -> Decodes:
    slots, starts = _read_indices(m.decode_slots), _read_indices(m.decode_starts)
    grown = _read_indices(m.grown_slots)
    if len(slots) != len(starts) or not set(grown) <= set(slots):
        raise ValueError("columns disagree")
    return Decodes(tuple(slots), tuple(starts), tuple(zip(grown, _read_indices(m.grown_blocks), strict=True)))


def _chunks_from(m: pb.Plan) -> tuple[Row, ...]:
    blocks = _split(_read_indices(m.new_blocks), _read_ints(m.num_new_blocks))
    slots, starts, counts = _read_indices(m.slots), _read_indices(m.starts), _read_indices(m.counts)
    drafts = _read("i", m.num_drafts) if m.num_drafts else [0] * len(slots)
    if 0 in counts or len({len(slots), len(starts), len(counts), len(m.outputs), len(blocks), len(drafts)}) != 1:
        raise ValueError("columns disagree")
    if min(drafts, default=0) < 0:
        raise ValueError("a negative number of drafts")
    if m.outputs and max(m.outputs) >= len(_OUTPUTS):
        raise ValueError("an unknown output")
    return tuple(map(Row, slots, starts, counts, map(_OUTPUTS.__getitem__, m.outputs), blocks, drafts))


def _init_to(init: SlotInit) -> pb.SlotInit:
    return pb.SlotInit(
        slot=init.slot,
        tokens=_ints(init.tokens),
        prompt_len=init.prompt_len,
        blocks=_ints(init.blocks),
        sampling=sampling_codec.to_message(init.sampling),
        adapter=init.adapter,
        num_top_scores=init.num_top_scores,
        pooling=None if init.pooling is None else pb.Pooling(**init.pooling._asdict()),
    )


def _init_from(m: pb.SlotInit) -> SlotInit:
    tokens, blocks = tuple(_read_indices(m.tokens)), tuple(_read_indices(m.blocks))
    if min(m.slot, m.adapter, m.num_top_scores) < 0 or not 0 < m.prompt_len <= len(tokens):
        raise ValueError("slot, adapter, num_top_scores or prompt_len out of range")
    pooling = _pooling_from(m.pooling) if m.HasField("pooling") else None
    sampling = sampling_codec.from_message(m.sampling)
    return SlotInit(m.slot, tokens, m.prompt_len, blocks, sampling, m.adapter, m.num_top_scores, pooling)


def _pooling_from(m: pb.Pooling) -> Pooling:
    if m.dimensions < 0:
        raise ValueError("a negative number of dimensions")
    return Pooling(PoolingKind(m.kind), m.dimensions, m.normalize)


def _result_to(result: StepResult) -> pb.Result:
    message = pb.Result(
        tokens=_ints(result.tokens), bad_rows=_ints(sorted(result.bad_rows)), step_seconds=result.step_seconds
    )
    if result.stuck_rows:
        message.stuck_rows = _ints(sorted(result.stuck_rows))
    if result.deferred_rows:
        message.deferred_rows = _ints(sorted(result.deferred_rows))
    if result.logprobs:
        # A row that did not ask is marked by -1 top entries.
        message.logprobs = _floats(0.0 if x is None else x.logprob for x in result.logprobs)
        message.num_top = _ints(-1 if x is None else len(x.top) for x in result.logprobs)
        tops = [entry for x in result.logprobs if x is not None for entry in x.top]
        message.top_ids, message.top_logprobs = _ints(i for i, _ in tops), _floats(v for _, v in tops)
    if result.counts or result.scores or result.vectors or result.num_drafted or result.draft_seconds:
        message.outputs.CopyFrom(_outputs_to(result))
    return message


def _outputs_to(result: StepResult) -> pb.Outputs:
    scores = result.scores
    return pb.Outputs(
        counts=_ints(result.counts),
        score_counts=_ints(len(row.logprobs) for row in scores),
        num_top=_ints(row.num_top for row in scores),
        scores=_floats(chain.from_iterable(row.logprobs for row in scores)),
        top_ids=_ints(chain.from_iterable(row.top_ids for row in scores)),
        top_logprobs=_floats(chain.from_iterable(row.top_logprobs for row in scores)),
        vectors=result.vectors,
        num_drafted=_ints(result.num_drafted),
        draft_seconds=result.draft_seconds,
    )


def _result_from(epoch: int, step: int, payload: bytes) -> StepResult:
    m = pb.Result.FromString(payload)
    tokens, bad, stuck = _read_ints(m.tokens), _read_set(m.bad_rows), _read_set(m.stuck_rows)
    logprobs = _logprobs_from(m, len(tokens)) if m.num_top or m.logprobs or m.top_ids or m.top_logprobs else ()
    result = StepResult(epoch, step, tuple(tokens), logprobs, bad, m.step_seconds, stuck_rows=stuck)
    if m.HasField("outputs"):
        result = _with_outputs(result, m.outputs)
    if m.deferred_rows:
        result = replace(result, deferred_rows=_read_set(m.deferred_rows))
    rows = bad | stuck | result.deferred_rows
    if rows and not 0 <= min(rows) <= max(rows) < result.num_outputs:
        raise ValueError("a bad, stuck or deferred row outside the plan")
    return result


def _logprobs_from(m: pb.Result, num_tokens: int) -> tuple[Logprobs | None, ...]:
    chosen, num_top = _read_floats(m.logprobs), _read_ints(m.num_top)
    if not len(chosen) == len(num_top) == num_tokens:
        raise ValueError("columns disagree")
    tops = list(zip(_read_ints(m.top_ids), _read_floats(m.top_logprobs), strict=True))
    pieces = _split(tops, [max(n, 0) for n in num_top])
    return tuple(None if n < 0 else Logprobs(v, top) for v, n, top in zip(chosen, num_top, pieces, strict=True))


def _read_set(data: bytes) -> frozenset[int]:
    return frozenset(_read_ints(data)) if data else frozenset()


def _with_outputs(result: StepResult, m: pb.Outputs) -> StepResult:
    """Return the result with the outputs that are not one token for each sampling row."""
    counts, rows, vectors = _read_indices(m.counts), _read_indices(m.score_counts), tuple(m.vectors)
    num_top = [n * k for n, k in zip(rows, _read_indices(m.num_top), strict=True)]
    values, ids = _split(_read_floats(m.scores), rows), _split(_read_ints(m.top_ids), num_top)
    scores = tuple(map(Scores, values, ids, _split(_read_floats(m.top_logprobs), num_top)))
    drafted = tuple(_read_indices(m.num_drafted))
    if (counts and sum(counts) != len(result.tokens)) or any(len(vector) % 4 for vector in vectors):
        raise ValueError("columns disagree")
    result = replace(result, counts=tuple(counts), scores=scores, vectors=vectors)
    return replace(result, num_drafted=drafted, draft_seconds=m.draft_seconds)


# --- control ---------------------------------------------------------------------------------------------------------

_Encoder = Callable[[Any], ProtobufMessage]
_Decoder = Callable[[int, int, bytes], Message]


def _by_name(
    kind: type[Any], payload: type[ProtobufMessage], check: Callable[[Any], None] = lambda message: None
) -> tuple[_Encoder, _Decoder]:
    """Return encoder and decoder of a message whose payload has fields of the same names; the header has the others.

    `check` raises ValueError for a decoded message that cannot be.
    """
    types = {field.name: get_type_hints(kind)[field.name] for field in payload.DESCRIPTOR.fields}
    has_step = "step" in {field.name for field in fields(kind)}

    def encoded(message: Any) -> ProtobufMessage:
        values = {name: getattr(message, name) for name in types}
        return payload(**{name: value.value if isinstance(value, Enum) else value for name, value in values.items()})

    def decoded(epoch: int, step: int, data: bytes) -> Message:
        found = payload.FromString(data)
        values = {name: convert(getattr(found, name)) for name, convert in types.items()}
        message: Message = kind(epoch=epoch, **values, **{"step": step} if has_step else {})
        check(message)
        return message

    return encoded, decoded


def _check_hello(hello: Hello) -> None:
    sizes = (hello.num_blocks, hello.block_size, hello.num_slots, hello.max_model_len, hello.vocab_size)
    if min(*sizes, hello.max_step_tokens) < 1:
        raise ValueError("a capacity is not positive")
    if hello.num_swap_blocks < 0 or not 0 <= hello.swap_seconds < inf:
        raise ValueError("host blocks or the time to copy one out of range")
    if hello.num_state_snapshots < 0:
        raise ValueError("a negative number of snapshots")
    if not 0 <= hello.load_seconds < inf:
        raise ValueError("a worker that was ready before it started")


def _check_index(message: LoadAdapter | UnloadAdapter | AdapterLoaded) -> None:
    if message.index < 1:
        raise ValueError("an adapter index below 1")


def _heartbeat_to(h: Heartbeat) -> pb.Heartbeat:
    return pb.Heartbeat(step=h.step, busy_seconds=h.busy_seconds, prepared=_ints(h.prepared))


def _heartbeat_from(epoch: int, step: int, payload: bytes) -> Heartbeat:
    m = pb.Heartbeat.FromString(payload)
    return Heartbeat(epoch, m.step, m.busy_seconds, tuple(_read_indices(m.prepared)))


_KINDS: dict[type, tuple[int, _Encoder, _Decoder]] = {
    StepPlan: (1, _plan_to, _plan_from),
    StepResult: (2, _result_to, _result_from),
    Hello: (3, *_by_name(Hello, pb.Hello, _check_hello)),
    Heartbeat: (4, _heartbeat_to, _heartbeat_from),
    StepError: (5, *_by_name(StepError, pb.StepError)),
    Rejoin: (6, *_by_name(Rejoin, pb.Rejoin)),
    Goodbye: (7, *_by_name(Goodbye, pb.Goodbye)),
    SetLogLevel: (8, *_by_name(SetLogLevel, pb.SetLogLevel)),
    Stopping: (9, *_by_name(Stopping, pb.Stopping)),
    LoadAdapter: (10, *_by_name(LoadAdapter, pb.LoadAdapter, _check_index)),
    UnloadAdapter: (11, *_by_name(UnloadAdapter, pb.UnloadAdapter, _check_index)),
    AdapterLoaded: (12, *_by_name(AdapterLoaded, pb.AdapterLoaded, _check_index)),
    PrepareGrammar: (13, *_by_name(PrepareGrammar, pb.PrepareGrammar)),
    Profile: (14, *_by_name(Profile, pb.Profile)),
    Profiled: (15, *_by_name(Profiled, pb.Profiled)),
}
_DECODERS: dict[int, _Decoder] = {kind: from_payload for kind, _, from_payload in _KINDS.values()}
