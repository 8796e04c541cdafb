"""Answers from the pieces that a server sends, and dataclasses with every field of the schema."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lineclear.client import message_classes, results
from lineclear.client.answer_assembler import AnswerAssembler
from lineclear.client.results import FinishReason, Started, TokenLogprobs, TopLogprob, Usage
from lineclear.errors import DataLoss
from lineclear.v1 import inference_pb2 as pb

MIRRORED: list[tuple[type[Any], Any]] = [
    *((getattr(results, name), getattr(pb, name)) for name in ("Started", "Usage", "Timings", "TopLogprob")),
    (results.TokenLogprobs, pb.TokenLogprobs), (message_classes.Model, pb.GetModelResponse),
    (message_classes.Stats, pb.GetStatsResponse),
    *((getattr(message_classes, name), getattr(pb, name))
      for name in ("Adapter", "Limits", "Counters", "Gauges", "Quantiles", "WorkerStatus", "WorkerStats")),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "message"), MIRRORED)
def test_dataclass_fields_match_the_schema(kind: type[Any], message: Any) -> None:
    expected = {
        f"{field.name}_seconds" if field.message_type is not None and field.message_type.name == "Duration" else
        field.name
        for field in message.DESCRIPTOR.fields
    }  # fmt: skip
    assert {field.name for field in dataclasses.fields(kind)} == expected


def test_finish_reasons_match_the_schema() -> None:
    words = {name.removeprefix("FINISH_REASON_").lower() for name in dict(pb.FinishReason.items())}
    assert {reason.value for reason in results.FinishReason} == words


def test_unknown_finish_reason_is_unspecified() -> None:
    message = pb.GenerateResponse.FromString(b"\x3a\x02\x08\x63")  # finished { reason: 99 }
    assert results.delta_from_proto(message).finish_reason is results.FinishReason.UNSPECIFIED


def generation(completion_tokens: int, decode_seconds: float, e2e_seconds: float, resumes: int = 0) -> Any:
    return results.Generation(
        text="", token_ids=(), finish_reason=results.FinishReason.LENGTH, matched_stop=None,
        usage=results.Usage(completion_tokens=completion_tokens), started=results.Started(request_id="r"),
        timings=results.Timings(decode_time_seconds=decode_seconds, e2e_latency_seconds=e2e_seconds), resumes=resumes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("figures", "rate"),
    [
        ((5, 2.0, 9.0), 2.0),
        ((1, 0.0, 0.5), 2.0),
        ((0, 0.0, 1.0), None),
        ((5, 2.0, 9.0, 1), None),
        ((2, 0.0, 1.0), None),
    ],
)
def test_tokens_per_second(figures: tuple[Any, ...], rate: float | None) -> None:
    answer = generation(*figures)
    assert answer.tokens_per_second == answer.to_dict()["tokens_per_second"] == rate
    assert answer.request_id == answer.to_dict()["request_id"] == "r"


def test_responses_make_the_answer() -> None:
    assembly = AnswerAssembler()
    assert assembly.add(pb.GenerateResponse(started=pb.Started(request_id="r", seed=4))).started == Started("r", seed=4)
    logprobs = [pb.TokenLogprobs(logprob=-1.5, top_logprobs=[pb.TopLogprob(token_id=5, logprob=-0.5)])]
    assembly.add(pb.GenerateResponse(token_ids=[5], text="a", logprobs=logprobs, token_times_us=[1500]))
    delta = assembly.add(
        pb.GenerateResponse(
            first_index=1,
            text="b",
            finished=pb.Finished(
                finish_reason=pb.FINISH_REASON_STOP_STRING, matched_stop_string="!", usage=pb.Usage(completion_tokens=1)
            ),
        )
    )
    assembly.close()
    result = assembly.generation()
    assert delta.finish_reason is result.finish_reason is FinishReason.STOP_STRING
    assert (result.text, result.token_ids, result.matched_stop) == ("ab", (5,), "!")
    assert result.logprobs == (TokenLogprobs(-1.5, (TopLogprob(5, -0.5),)),)
    assert result.token_times_seconds == (0.0015,)
    assert (result.usage, result.started.seed) == (Usage(completion_tokens=1), 4)


def test_a_matched_token_is_its_id_even_when_that_is_zero() -> None:
    assembly = AnswerAssembler()
    assembly.add(pb.GenerateResponse(finished=pb.Finished(finish_reason=pb.FINISH_REASON_STOP_EOS, matched_token_id=0)))
    assert assembly.generation().matched_stop == 0


@pytest.mark.parametrize(("count", "index"), [(2, 0), (2, 1), (2, 3), (0, 1)])
def test_a_gap_or_a_repetition_is_data_loss(count: int, index: int) -> None:
    assembly = AnswerAssembler()
    assembly.add(pb.GenerateResponse(token_ids=range(count)))
    with pytest.raises(DataLoss) as caught:
        assembly.add(pb.GenerateResponse(first_index=index, token_ids=[3]))
    assert caught.value.metadata == {"expected_index": str(count), "received_index": str(index)}


def test_missing_logprobs_are_data_loss() -> None:
    with pytest.raises(DataLoss, match="2 tokens and 1 token times"):
        AnswerAssembler().add(pb.GenerateResponse(token_ids=[1, 2], token_times_us=[5]))
    with pytest.raises(DataLoss, match="1 tokens and 2 logprobs"):
        AnswerAssembler().add(pb.GenerateResponse(token_ids=[1], logprobs=[pb.TokenLogprobs(), pb.TokenLogprobs()]))
