"""Read the outputs of a request as protobuf responses: for Generate, Session and submitted requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from google.protobuf.duration_pb2 import Duration

from lineclear.api_limits import MAX_PIECE_BYTES
from lineclear.errors import LineclearError
from lineclear.scheduler.core.events import FinishReason, Started
from lineclear.scheduler.requests.logprob_messages import token_logprob
from lineclear.scheduler.requests.output_stream import Completion, OutputChunk, OutputStream
from lineclear.scheduler.requests.request_context import RequestContext
from lineclear.scheduler.requests.request_metrics import RequestTimings
from lineclear.scheduler.text.parsed_answer import ParsedText, call_id
from lineclear.v1 import inference_pb2 as pb

_REASONS = {
    FinishReason.STOP_EOS: pb.FINISH_REASON_STOP_EOS,
    FinishReason.STOP_TOKEN: pb.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    FinishReason.REPETITION: pb.FINISH_REASON_REPETITION,
}


AnswerPart: TypeAlias = tuple[pb.GenerateResponse, Sequence[str], LineclearError | None]
"""A response with the text of each of its tokens and of the end; or an empty response and the error of the request."""


def read_answer(request: RequestContext) -> Iterator[AnswerPart]:
    """Yield the unread parts of all outputs. Does not wait."""
    for output in request.outputs:
        if not request.is_closed:
            yield from read_output(request, output)


def read_output(request: RequestContext, output: OutputStream, max_bytes: int | None = None) -> Iterator[AnswerPart]:
    """Yield the unread parts of an output, up to about `max_bytes`.

    Does not wait. After the end of the last output, yield the error of the request, if it has one, and close it once
    that was used. A bug in a response ends the request with an incident.
    """
    bytes_left = MAX_PIECE_BYTES if max_bytes is None else max_bytes
    while output.has_output and bytes_left > 0:
        chunk = output.read_nowait(bytes_left)
        end, error = chunk.end, chunk.error
        if error is None:
            try:
                timings = None if end is None else request.record_completion(output, end)
                message = response(chunk, request, output, timings)
            except Exception as bug:
                error = request.services.incident(bug)
                output.cancel(error, discard_unread=True)
            else:
                yield message, chunk.texts, None
        if error is not None or end is not None:
            output.is_read = True
            if request.end_output(None if end is None else end.reason, error):
                if request.error is not None:
                    yield pb.GenerateResponse(), (), request.error
                request.close()
            return
        if max_bytes is not None:
            bytes_left -= message.ByteSize()


def response(
    chunk: OutputChunk, request: RequestContext, output: OutputStream, timings: RequestTimings | None
) -> pb.GenerateResponse:
    """Build the response for one chunk of `output`. `timings` belong to the chunk with the end."""
    validated = request.validated
    message = pb.GenerateResponse(first_index=chunk.first_index, token_ids=chunk.token_ids)
    if output.index:
        message.index = output.index
    if validated.wants_text:
        message.text = "".join(chunk.texts)
        if output.is_parsed:
            add_parsed(message, chunk.texts, request.call_key(output))
    if chunk.logprobs:
        num_ids = len(validated.sampling.logprob_ids)
        message.logprobs.extend(token_logprob(entry, num_ids) for entry in chunk.logprobs)
    if chunk.prompt_logprobs:
        message.MergeFromString(b"".join(chunk.prompt_logprobs))
    if validated.token_timings:
        message.token_times_us.extend(max(0, round((at - request.call.arrival) * 1e6)) for at in chunk.times)
    if chunk.queued is not None:
        message.queued.requests_ahead = chunk.queued.requests_ahead
        if (wait := duration(chunk.queued.seconds)) is not None:
            message.queued.predicted_wait.CopyFrom(wait)
    if chunk.started is not None:
        _fill_started(message.started, chunk.started, request, output)
        if request.prompt_echo is not None and output.index == 0:
            message.prompt_echo.CopyFrom(request.prompt_echo)
    if chunk.end is not None:
        assert timings is not None
        message.finished.CopyFrom(_finished(chunk.end, timings, output))
    return message


def _fill_started(message: pb.Started, started: Started, request: RequestContext, output: OutputStream) -> None:
    message.request_id = request.request_id
    message.prompt_tokens = request.shape.prompt_tokens
    message.cached_tokens = started.cached_tokens
    message.seed = request.seed_of(output)
    message.num_outputs = len(request.validated.received)
    message.slot, message.first_step = started.slot, started.step
    message.model_fingerprint = request.fingerprint(started.model_fingerprint)
    message.prompt_digest = request.prompt_digest
    message.chat_time_us = request.chat_time_us
    message.timeout.FromMicroseconds(round((request.deadline - request.call.arrival) * 1e6))


def add_parsed(message: pb.GenerateResponse, texts: Sequence[str], key: str) -> None:
    """Add the reasoning and the calls of a parsed answer, one delta for each call. Its call ids derive from `key`."""
    reasoning: list[str] = []
    arguments: dict[int, list[str]] = {}
    names: dict[int, str] = {}
    for text in texts:
        if not isinstance(text, ParsedText):
            continue
        if text.reasoning:
            reasoning.append(text.reasoning)
        for part in text.calls:
            arguments.setdefault(part.call, []).append(part.arguments)
            if part.name:
                names[part.call] = part.name
    message.reasoning = "".join(reasoning)
    for index, parts in arguments.items():
        delta = message.tool_calls.add(index=index, arguments="".join(parts))
        if index in names:
            delta.id, delta.name = call_id(key, index), names[index]


def _finished(end: Completion, timings: RequestTimings, output: OutputStream) -> pb.Finished:
    stats, counts_prompt = end.stats, output.index == 0
    return pb.Finished(
        finish_reason=_finish_reason(end),
        matched_stop_string=end.matched_stop_string,
        matched_token_id=end.matched_token_id,
        score=output.score,
        usage=pb.Usage(
            prompt_tokens=stats.prompt_tokens if counts_prompt else 0,
            completion_tokens=end.completion_tokens,
            cached_tokens=stats.cached_tokens if counts_prompt else 0,
            recomputed_tokens=stats.recomputed_tokens,
        ),
        timings=pb.Timings(
            queue_time=duration(timings.queue_time),
            time_to_first_token=duration(timings.time_to_first_token),
            decode_time=duration(timings.decode_time),
            e2e_latency=duration(timings.e2e_latency),
            preemptions=stats.preemptions,
            recoveries=stats.recoveries,
            last_step=stats.last_step,
            drafted_tokens=stats.drafted_tokens,
            accepted_tokens=stats.accepted_tokens,
        ),
    )


def _finish_reason(end: Completion) -> pb.FinishReason.ValueType:
    has_stopped = end.reason in (FinishReason.STOP_EOS, FinishReason.STOP_TOKEN)
    return pb.FINISH_REASON_TOOL_CALLS if end.has_tool_calls and has_stopped else _REASONS[end.reason]


def duration(seconds: float | None) -> Duration | None:
    """Convert seconds to a Duration; None stays unset."""
    if seconds is None:
        return None
    whole, nanos = divmod(max(0, round(seconds * 1e9)), 10**9)
    return Duration(seconds=whole, nanos=nanos)
