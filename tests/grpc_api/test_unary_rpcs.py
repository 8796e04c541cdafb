"""Unary RPCs without a generation: Tokenize, Detokenize, GetModel and GetStats."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.serving import (
    EOS,
    HELLO,
    HELLO_IDS,
    TOKENIZER,
    read_all,
    serving,
)

from lineclear.v1 import inference_pb2 as pb


async def test_tokenize_and_detokenize_match_generate(tmp_path: Path) -> None:
    async with serving(tmp_path, joined=False) as s:
        tokenized = await s.stub.Tokenize(pb.TokenizeRequest(text="a <|im_end|> b"))
        assert list(tokenized.token_ids) == TOKENIZER.encode("a <|im_end|> b")
        chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
        ids = list((await s.stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids)
        text = await s.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids, keep_special_tokens=True))
        assert text.text == "<|im_start|>user\nhi<|im_end|>\n"
        text = await s.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))
        assert text.text == "user\nhi\n"
        empty = await s.stub.Detokenize(pb.DetokenizeRequest())
        assert empty.text == ""


async def test_the_model_and_its_limits(tmp_path: Path) -> None:
    async with serving(tmp_path, max_batch_size=4, target_batch_tokens=1000, served_model_name="named") as s:
        model = await s.stub.GetModel(pb.GetModelRequest())
        assert (model.model_id, model.family, model.context_length) == ("named", "llama", 128)
        assert (model.vocab_size, list(model.eos_token_ids)) == (512, [EOS])
        assert (model.device, model.dtype, model.attention_backend) == ("cpu", "float32", "toy")
        assert (model.forward_pass, model.forward_pass_reason) == ("modules", "it is a toy")
        assert model.has_chat_template
        assert (model.limits.max_batch_size, model.limits.target_batch_tokens) == (4, 256)
        assert model.limits.num_blocks == 64
        assert model.limits.num_slots == 4
        assert model.limits.max_outputs == 128
        assert model.server_version


@pytest.mark.parametrize(("requested", "in_force"), [(None, 500.0), (50.0, 50.0), (5000.0, 1000.0)])
async def test_applied_deadline_is_returned(tmp_path: Path, requested: float | None, in_force: float) -> None:
    """A call without a deadline has the server's; one with a later deadline than allowed has the latest allowed."""

    async with serving(tmp_path, default_deadline_seconds=500.0, max_deadline_seconds=1000.0) as s:
        limits = (await s.stub.GetModel(pb.GetModelRequest())).limits
        assert (limits.default_deadline.ToSeconds(), limits.max_deadline.ToSeconds()) == (500, 1000)
        s.engine.answer = lambda request: HELLO_IDS
        call = s.stub.Generate(pb.GenerateRequest(text="hi"), timeout=requested)
        started = [message.started async for message in call if message.HasField("started")]
        (timeout_seconds,) = [message.timeout.ToNanoseconds() / 1e9 for message in started]
        # gRPC rounds the timeout, and some of it passes before the call arrives.
        assert in_force - 10 < timeout_seconds <= in_force * 1.02


async def test_stats_count_requests(tmp_path: Path) -> None:
    async with serving(tmp_path, scheduling_policy="shortest") as s:
        empty = await s.stub.GetStats(pb.GetStatsRequest())
        assert empty.e2e_request_latency_seconds == pb.Quantiles()
        s.engine.answer = lambda request: HELLO_IDS
        for _ in range(3):
            await read_all(s.generate())
        stats = await s.stub.GetStats(pb.GetStatsRequest())
        total = stats.e2e_request_latency_seconds
        assert total.count == 3
        assert 0 < total.p50 <= total.p99 <= total.max
        assert stats.time_to_first_token_seconds.count == 3
        assert stats.request_mean_inter_token_latency_seconds.count == 3
        assert stats.generation_tokens_per_second > 0
        assert stats.worker.up
        assert stats.worker.pid == HELLO.pid
        assert (stats.scheduling_policy, stats.batching_strategy) == ("shortest", "continuous")
        assert stats.gauges.asyncio_tasks > 0
