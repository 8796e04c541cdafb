"""Damaged bytes, and frames with a valid header over a damaged payload."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Sequence

HEADER_BYTES = 28
_CRC_OFFSET = 24


def mutate(data: bytes, dice: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """Return `data` with one to four random mutations; some insert pieces of `others`."""
    mutated = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(mutated) + 1)
        match dice.randrange(7 if others else 6):
            case 0 if at < len(mutated):
                mutated[at] = dice.randrange(256)
            case 1 if at < len(mutated):
                mutated[at] ^= 1 << dice.randrange(8)
            case 2:
                del mutated[at : at + dice.randint(1, 8)]
            case 3:
                mutated[at:at] = dice.randbytes(dice.randint(1, 8))
            case 4:
                mutated[at:at] = mutated[at : at + dice.randint(1, 32)] * dice.randint(1, 16)
            case 6:
                other = dice.choice(others)
                begin = dice.randrange(len(other) + 1)
                mutated[at:at] = other[begin : begin + dice.randint(1, 64)]
            case _:  # a varint of up to 10 bytes
                mutated[at : at + 1] = b"\xff" * dice.randint(1, 9) + b"\x01"
    return bytes(mutated)


def resealed(frame: bytes, payload: bytes) -> bytes:
    """Return the header of `frame` with another payload and the right checksum."""
    fields = frame[:_CRC_OFFSET]
    return fields + struct.pack("<I", zlib.crc32(payload, zlib.crc32(fields))) + payload


def damaged_payload(frame: bytes, dice: random.Random) -> bytes:
    """Return `frame` with a damaged payload and the right checksum, so that the payload is parsed."""
    return resealed(frame, mutate(frame[HEADER_BYTES:], dice))
