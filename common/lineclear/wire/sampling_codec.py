"""Sampling parameters to bytes and back: the scalars as one packed structure, each list by the type of its field."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any, NamedTuple, get_type_hints

from lineclear.wire.sampling import LISTS, SCALARS, Sampling
from lineclear.wire.v1 import step_pb2 as pb

_SCALARS = struct.Struct("<" + "".join(scalar.format for scalar in SCALARS.values()))
_scalars_of = attrgetter(*SCALARS)
_lists_of = attrgetter(*LISTS)


def to_message(sampling: Sampling) -> pb.Sampling:
    """Return the message. Empty lists cost nothing."""
    lists = _lists_of(sampling)
    message = pb.Sampling(scalars=_SCALARS.pack(*_scalars_of(sampling)))
    if any(lists):
        message.lists.extend(kind.encode(values) for kind, values in zip(_KINDS, lists, strict=True))
    return message


def from_message(message: pb.Sampling) -> Sampling:
    """Return the parameters. Raises ValueError."""
    if len(message.scalars) != _SCALARS.size or len(message.lists) not in (0, len(LISTS)):
        raise ValueError("sampling parameters of another form")
    values = dict(zip(SCALARS, _SCALARS.unpack(message.scalars), strict=True))
    try:
        for name, kind, data in zip(LISTS, _KINDS, message.lists, strict=False):
            values[name] = kind.decode(data)
    except struct.error as error:
        raise ValueError("no whole number of integers") from error
    return Sampling(**values)


class _Kind(NamedTuple):
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


def _encode_ids(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def _decode_ids(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 4}i", data)


def _encode_biases(biases: Sequence[tuple[int, float]]) -> bytes:
    return b"".join(struct.pack("<if", token_id, bias) for token_id, bias in biases)


def _decode_biases(data: bytes) -> tuple[tuple[int, float], ...]:
    return tuple(struct.iter_unpack("<if", data))


def _encode_sequences(sequences: Sequence[Sequence[int]]) -> bytes:
    """Encode their number, their lengths, and all ids one after the other."""
    return _encode_ids([len(sequences), *map(len, sequences), *chain.from_iterable(sequences)]) if sequences else b""


def _decode_sequences(data: bytes) -> tuple[tuple[int, ...], ...]:
    if not data:
        return ()
    values = _decode_ids(data)
    lengths, ids = values[1 : values[0] + 1], values[values[0] + 1 :]
    if len(lengths) != values[0] or min(lengths, default=0) < 0 or sum(lengths) != len(ids):
        raise ValueError("sequences and their lengths disagree")
    return tuple([ids[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)])


_BY_TYPE = {
    tuple[int, ...]: _Kind(_encode_ids, _decode_ids),
    tuple[tuple[int, float], ...]: _Kind(_encode_biases, _decode_biases),
    tuple[tuple[int, ...], ...]: _Kind(_encode_sequences, _decode_sequences),
    str: _Kind(str.encode, bytes.decode),
}
_HINTS = get_type_hints(Sampling)
_KINDS = [_BY_TYPE[_HINTS[name]] for name in LISTS]
