"""Encode log probabilities: of output tokens, of prompts, and of Score.

Those of Score are encoded in slices, so that the event loop serves streams in between. As messages, 4 MB of scores
would be 400,000 objects, and encoding them all takes the event loop 30 ms. The encodings of the parts of a message, one
behind the other, are the encoding of the message.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from lineclear.scheduler.requests.loop_pacer import LoopPacer
from lineclear.v1 import inference_pb2 as pb
from lineclear.wire.messages import Logprobs, Scores

_SLICE = 512
"""Entries that are made at once: about half a millisecond of the event loop."""
_SCORES_TAG = bytes((pb.ScoreResponse.SCORES_FIELD_NUMBER << 3 | 2,))


def token_logprob(logprobs: Logprobs, num_ids: int = 0) -> pb.TokenLogprobs:
    """Return the entry of one token. The last `num_ids` of its candidates are those that the request names."""
    num_top = len(logprobs.top) - num_ids
    message = pb.TokenLogprobs(logprob=logprobs.logprob, top_logprobs=_candidates(logprobs.top[:num_top]))
    if num_ids:
        message.token_id_logprobs.extend(_candidates(logprobs.top[num_top:]))
    return message


def _candidates(entries: Sequence[tuple[int, float]]) -> list[pb.TopLogprob]:
    # Masked tokens have -inf, which JSON cannot hold, and no order.
    return [pb.TopLogprob(token_id=token_id, logprob=value) for token_id, value in entries if value > -math.inf]


def encoded_prompt_logprobs(scores: Scores) -> bytes:
    """Return the encoding of a response that has the entries of some positions, and nothing else."""
    return pb.GenerateResponse(prompt_logprobs=token_logprobs([scores])).SerializeToString()


def token_logprobs(scores: Iterable[Scores]) -> list[pb.TokenLogprobs]:
    """Return the scores of consecutive prompt positions, one entry for each."""
    entries = []
    for row in scores:
        count = row.num_top
        for index, logprob in enumerate(row.logprobs):
            place = slice(index * count, (index + 1) * count)
            top = zip(row.top_ids[place], row.top_logprobs[place], strict=True)
            entries.append(token_logprob(Logprobs(logprob, tuple(top))))
    return entries


async def encoded_score(token_ids: Sequence[int], rows: Sequence[Scores], pacer: LoopPacer) -> bytes:
    """Return a part of the encoded ScoreResponse: the score of one continuation."""
    total = sum(sum(row.logprobs) for row in rows)
    parts = [pb.ContinuationScore(token_ids=token_ids, total_logprob=total).SerializeToString()]
    for row in rows:
        count = max(1, _SLICE // (1 + row.num_top))
        for start in range(0, len(row.logprobs), count):
            await pacer.wait()
            with pacer.measured():
                entries = token_logprobs([row.part(start, start + count)])
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
