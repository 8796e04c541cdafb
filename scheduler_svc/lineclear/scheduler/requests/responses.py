"""Messages about requests in progress: what a delivery, an end or an error looks like on the wire.

Decides only shapes. What is delivered when is `streams`', which rows travel together `session`'s.
"""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from lineclear.scheduler.core.events import FinishReason
from lineclear.scheduler.requests.admission import RequestContext
from lineclear.scheduler.requests.output_stream import Completion, OutputChunk
from lineclear.scheduler.requests.request_stats import RequestTimings
from lineclear.v1 import inference_pb2 as pb
from lineclear.wire.messages import Logprobs

_REASONS = {
    FinishReason.STOP_EOS: pb.FINISH_REASON_STOP_EOS,
    FinishReason.STOP_TOKEN: pb.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


def response(delivery: OutputChunk, ticket: RequestContext, spent: RequestTimings | None) -> pb.GenerateResponse:
    """What was delivered of the ticket's request. `spent` is there where the delivery is the last one."""
    checked = ticket.checked
    message = pb.GenerateResponse(first_index=delivery.first_index, token_ids=delivery.token_ids)
    if checked.wants_text:
        message.text = delivery.text
    if delivery.logprobs:
        message.logprobs.extend(map(_logprobs, delivery.logprobs))
    if checked.token_timings:
        message.token_times_us.extend(max(0, round((at - ticket.arrival) * 1e6)) for at in delivery.times)
    if delivery.started is not None:
        message.started.request_id = ticket.output.request_id
        message.started.prompt_tokens = ticket.prompt_tokens
        message.started.cached_tokens = delivery.started.cached_tokens
        message.started.seed = checked.sampling.seed
        message.started.slot = delivery.started.slot
        message.started.first_step = delivery.started.step
        message.started.model_fingerprint = delivery.started.model_fingerprint
        message.started.prompt_digest = ticket.prompt_digest
        message.started.chat_time_us = ticket.chat_time_us
        message.started.timeout.FromMicroseconds(round((ticket.deadline - ticket.arrival) * 1e6))
    if delivery.end is not None:
        assert spent is not None
        message.finished.CopyFrom(_finished(delivery.end, spent))
    return message


def _logprobs(of_token: Logprobs) -> pb.TokenLogprobs:
    top = [pb.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in of_token.top]
    return pb.TokenLogprobs(logprob=of_token.logprob, top_logprobs=top)


def _finished(end: Completion, spent: RequestTimings) -> pb.Finished:
    record = end.record
    return pb.Finished(
        finish_reason=_REASONS[end.reason],
        matched_stop_string=end.matched_stop_string,
        matched_token_id=end.matched_token_id,
        usage=pb.Usage(
            prompt_tokens=record.prompt_tokens,
            completion_tokens=end.completion_tokens,
            cached_tokens=record.cached_tokens,
            recomputed_tokens=record.recomputed_tokens,
        ),
        timings=pb.Timings(
            queue_time=duration(spent.queue),
            time_to_first_token=duration(spent.first_token),
            decode_time=duration(spent.decode),
            e2e_latency=duration(spent.total),
            preemptions=record.preemptions,
            recoveries=record.recoveries,
            last_step=record.last_step,
        ),
    )


def duration(seconds: float | None) -> Duration | None:
    """As a message has it; None stays unset."""
    if seconds is None:
        return None
    span = Duration()
    span.FromNanoseconds(max(0, round(seconds * 1e9)))
    return span
