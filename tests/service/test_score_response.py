"""The response of Score is made in slices: the event loop serves streams meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from lineclear.scheduler.requests import prompt_requests, responses
from lineclear.v1 import inference_pb2 as pb
from lineclear.wire.messages import Scores


def scores(count: int, num_top: int) -> Scores:
    logprobs = tuple(-float(i) for i in range(count))
    top = range(count * num_top)
    return Scores(logprobs, tuple(top), tuple(-float(i) for i in top))


@pytest.mark.parametrize(("num_top", "most_entries"), [(0, 512), (20, 512)])
async def test_no_slice_has_many_entries(monkeypatch: pytest.MonkeyPatch, num_top: int, most_entries: int) -> None:
    made = [0]  # entries since the loop was free
    largest = 0
    make = responses.token_logprobs

    def counted(rows: list[Scores]) -> list[pb.TokenLogprobs]:
        nonlocal largest
        entries = make(rows)
        made[0] += sum(1 + len(entry.top_logprobs) for entry in entries)
        largest = max(largest, made[0])
        return entries

    async def free() -> None:
        while True:
            made[0] = 0
            await asyncio.sleep(0)

    monkeypatch.setattr(responses, "token_logprobs", counted)
    ticker = asyncio.ensure_future(free())
    rows = [scores(90, num_top), scores(1, num_top), scores(2000, num_top)]
    score = pb.ContinuationScore()
    await prompt_requests.add_scores(score, rows)
    ticker.cancel()
    assert list(score.logprobs) == make(rows)
    assert score.total_logprob == sum(logprob for row in rows for logprob in row.logprobs)
    assert largest <= most_entries
