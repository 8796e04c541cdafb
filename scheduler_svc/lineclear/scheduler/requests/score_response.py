"""Encode the response of Score in slices, so that the event loop serves streams in between.

As messages, 4 MB of scores would be 400,000 objects, and encoding them all takes the event loop 30 ms. The encodings of
the parts of a message, one behind the other, are the encoding of the message.
"""

from __future__ import annotations

from collections.abc import Sequence

from lineclear.scheduler.requests import responses
from lineclear.scheduler.requests.loop_pacer import LoopPacer
from lineclear.v1 import inference_pb2 as pb
from lineclear.wire.messages import Scores

_SLICE = 512
"""Entries that are made at once: about half a millisecond of the event loop."""
_SCORES_TAG = bytes((pb.ScoreResponse.SCORES_FIELD_NUMBER << 3 | 2,))


async def encoded_score(token_ids: Sequence[int], rows: Sequence[Scores], pacer: LoopPacer) -> bytes:
    """Return a part of the encoded ScoreResponse: the score of one continuation."""
    total = sum(sum(row.logprobs) for row in rows)
    parts = [pb.ContinuationScore(token_ids=token_ids, total_logprob=total).SerializeToString()]
    for row in rows:
        count = max(1, _SLICE // (1 + row.num_top))
        for start in range(0, len(row.logprobs), count):
            await pacer.wait()
            with pacer.measured():
                entries = responses.token_logprobs([row.part(start, start + count)])
                parts.append(pb.ContinuationScore(logprobs=entries).SerializeToString())
    score = b"".join(parts)
    return _SCORES_TAG + _varint(len(score)) + score


def _varint(number: int) -> bytes:
    """Encode a length as protobuf does: seven bits a byte, lowest first."""
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes((*encoded, number))
