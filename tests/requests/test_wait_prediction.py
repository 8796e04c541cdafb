"""A request whose deadline would pass in the queue is rejected on arrival, over the wire."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from support.processes import endless, starting
from support.processes import error_of as failure_of
from support.serving import error_of, serving

from lineclear.errors import DeadlineUnreachable
from lineclear.v1 import inference_pb2 as pb

IDS = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]))


async def test_call_with_unreachable_deadline_is_rejected(tmp_path: Path) -> None:
    async with serving(tmp_path, reject_unmeetable_deadlines=True) as s:
        s.engine.refusal = DeadlineUnreachable("no", metadata={"requests_ahead": "7", "least_wait_seconds": "20.000"})
        error = await error_of(s.generate(IDS, timeout=10))
        assert isinstance(error, DeadlineUnreachable)
        assert (error.code, error.retry_after_seconds) == ("DEADLINE_EXCEEDED", None)
        assert error.metadata == {"requests_ahead": "7", "least_wait_seconds": "20.000"}
        assert s.engine.submitted[0].deadline is not None
        await s.idle()


def test_deadline_behind_long_answers_is_rejected(model: Path) -> None:
    flags = ("--reject-unmeetable-deadlines", "--max-batch-size", "1", "--output-length-estimator", "none")
    with starting(model, *flags) as start:
        server = start(min_step_seconds=0.01, max_step_seconds=0.01)
        first, long = endless(1), endless(2)
        first.sampling.max_tokens, long.sampling.max_tokens = 10, 200
        long.output.queue_position = True
        assert list(server.stub.Generate(first))  # now the pace is known
        calls = [server.stub.Generate(long) for _ in range(4)]
        for call in calls:
            next(call)
        with pytest.raises(grpc.RpcError) as caught:
            next(server.stub.Generate(long, timeout=0.7))
        error = failure_of(caught.value)
        assert error.reason == "DEADLINE_UNREACHABLE"
        assert error.metadata["requests_ahead"] == "3"
        assert next(server.stub.Generate(long, timeout=60.0)).queued.requests_ahead == 3
