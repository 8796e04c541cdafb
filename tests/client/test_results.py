"""The dataclasses of responses have every field of the schema."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lineclear.client import message_classes, results
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


def test_durations_become_seconds_and_lists_tuples() -> None:
    timings = pb.Timings(preemptions=2)
    timings.queue_time.FromMicroseconds(1_250_000)
    assert results.from_proto(results.Timings, timings) == results.Timings(queue_time_seconds=1.25, preemptions=2)
    model = results.from_proto(
        message_classes.Model, pb.GetModelResponse(eos_token_ids=[1, 2], limits=pb.Limits(num_blocks=3))
    )
    assert (model.eos_token_ids, model.limits.num_blocks) == ((1, 2), 3)
    stats = results.from_proto(message_classes.Stats, pb.GetStatsResponse(step_seconds=pb.Quantiles(p99=2.0)))
    assert stats.step_seconds.p99 == 2.0


def generation(completion_tokens: int, decode_seconds: float, e2e_seconds: float, resumes: int = 0) -> Any:
    return results.Generation(
        text="", token_ids=(), finish_reason=results.FinishReason.LENGTH, matched_stop=None,
        usage=results.Usage(completion_tokens=completion_tokens), started=results.Started(request_id="r"),
        timings=results.Timings(decode_time_seconds=decode_seconds, e2e_latency_seconds=e2e_seconds), resumes=resumes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("completion_tokens", "decode_seconds", "e2e_seconds", "resumes", "rate"),
    [
        (5, 2.0, 9.0, 0, 2.0),
        (1, 0.0, 0.5, 0, 2.0),
        (0, 0.0, 1.0, 0, None),
        (5, 2.0, 9.0, 1, None),
        (2, 0.0, 1.0, 0, None),
    ],
)
def test_tokens_per_second(
    completion_tokens: int, decode_seconds: float, e2e_seconds: float, resumes: int, rate: float | None
) -> None:
    answer = generation(completion_tokens, decode_seconds, e2e_seconds, resumes)
    assert answer.tokens_per_second == rate
    assert answer.to_dict()["tokens_per_second"] == rate


def test_generation_has_the_id_of_its_request() -> None:
    answer = generation(1, 0.0, 1.0)
    assert answer.request_id == answer.to_dict()["request_id"] == "r"
