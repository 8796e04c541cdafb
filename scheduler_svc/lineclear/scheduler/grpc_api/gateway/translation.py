"""Requests of VllmEngine as lineclear's, and lineclear's responses as those of VllmEngine."""

from __future__ import annotations

import json
from collections.abc import Iterator

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from lineclear.errors import InvalidRequest
from lineclear.scheduler.requests.validate.request import MAX_TOP_LOGPROBS
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import sampling_pb2

_ALWAYS = ("min_p", "frequency_penalty", "presence_penalty", "min_tokens", "ignore_eos")
"""Fields of the same name and meaning, whose 0 is the value that changes nothing."""
_FORMS = ("regex", "grammar", "json_object")
_SEED_MASK = 0xFFFF_FFFF
_FINISH_REASONS = {
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_REPETITION: "length",
    pb.FINISH_REASON_CANCELLED: "abort",
}
"""All others are "stop"."""


def to_lineclear(request: vllm.GenerateRequest) -> pb.GenerateRequest:
    """Return the request in lineclear's terms. Raises InvalidRequest for what lineclear does not have."""
    message = pb.GenerateRequest()
    if request.request_id:
        message.request_id = request.request_id
    for name in ("mm_inputs", "media_refs", "kv_transfer_params", "kv_transfer_params_json"):
        if request.HasField(name):
            raise InvalidRequest.at(name, "is not supported: this server takes text, and computes its own KV cache")
    if request.extra_mm_inputs:
        raise InvalidRequest.at("extra_mm_inputs", "is not supported: this server takes text")
    if request.WhichOneof("input") == "text":
        message.text = request.text
    else:
        message.token_ids.ids.extend(request.tokenized.input_ids)
        message.token_ids.SetInParent()
    message.output.omit_text = True
    _set_sampling(message, request.sampling_params)
    return message


def _set_sampling(message: pb.GenerateRequest, params: vllm.SamplingParams) -> None:
    sampling, stop, output = message.sampling, message.stop, message.output
    for name in _ALWAYS:
        setattr(sampling, name, getattr(params, name))
    sampling.temperature = params.temperature if params.HasField("temperature") else 1.0
    sampling.top_k = params.top_k
    sampling.top_p = params.top_p or 1.0
    sampling.repetition_penalty = params.repetition_penalty or 1.0
    if params.HasField("max_tokens"):
        sampling.max_tokens = params.max_tokens
    if params.n:
        sampling.n = params.n
    if params.HasField("seed"):
        sampling.seed = params.seed & _SEED_MASK
    for token, bias in params.logit_bias.items():
        if token < 0:
            raise InvalidRequest.at("sampling_params.logit_bias", "has a negative token id")
        sampling.logit_bias.add(token_id=token, bias=bias)
    stop.strings.extend(params.stop)
    stop.token_ids.extend(params.stop_token_ids)
    stop.include_stop_string = params.include_stop_str_in_output
    if params.HasField("logprobs"):
        output.logprobs, output.top_logprobs = True, _num_logprobs(params.logprobs, "logprobs")
    if params.HasField("prompt_logprobs"):
        output.prompt_logprobs = _num_logprobs(params.prompt_logprobs, "prompt_logprobs")
    if params.HasField("truncate_prompt_tokens") and params.truncate_prompt_tokens > 0:
        message.truncate_prompt_tokens = params.truncate_prompt_tokens
    _set_form(sampling.structured_output, params)


def _num_logprobs(count: int, name: str) -> int:
    if count < 0:
        raise InvalidRequest.at(f"sampling_params.{name}", f"must be in [0, {MAX_TOP_LOGPROBS}]")
    return count


def _set_form(form: sampling_pb2.StructuredOutput, params: vllm.SamplingParams) -> None:
    kind = params.WhichOneof("constraint")
    if kind == "json_schema":
        form.json_schema = _of_required_calls(params.json_schema)
    elif kind in _FORMS:
        setattr(form, kind, getattr(params, kind))
    elif kind == "choice":
        form.choice.texts.extend(params.choice.choices)
    elif kind is not None:
        raise InvalidRequest.at(f"sampling_params.{kind}", "is not supported; give json_schema, regex or grammar")


def _of_required_calls(schema: str) -> str:
    """Return smg's schema of `tool_choice` "required" with no fields of a call but name and parameters.

    Other schemas are returned as they are. xgrammar, vLLM's default, allows an object no fields that its schema lacks.
    """
    try:
        whole = json.loads(schema) if '"anyOf"' in schema and '"parameters"' in schema else {}
        for call in whole["items"]["anyOf"]:
            if sorted(call["properties"]) != ["name", "parameters"]:
                return schema
            call.setdefault("additionalProperties", False)
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError):
        return schema
    return json.dumps(whole)


class AnswerTranslation:
    """Turns the responses to one request into messages of VllmEngine: deltas if it streams, else whole outputs.

    The end of each output is a `complete` message. One that a stop string ends loses the tokens of its text here as
    with vLLM: their number, not their ids, is what a gateway counts.
    """

    def __init__(self, request: vllm.GenerateRequest) -> None:
        self._is_stream = request.stream
        self._prompt_tokens = self._cached_tokens = 0
        self._outputs: dict[int, vllm.GenerateComplete] = {}
        self._num_tokens: dict[int, int] = {}
        self._num_outputs = max(1, request.sampling_params.n)

    def add(self, response: pb.GenerateResponse) -> Iterator[vllm.GenerateResponse]:
        if response.HasField("started"):
            self._prompt_tokens = max(self._prompt_tokens, response.started.prompt_tokens)
            self._cached_tokens = max(self._cached_tokens, response.started.cached_tokens)
        index, count = response.index, len(response.token_ids)
        self._num_tokens[index] = self._num_tokens.get(index, 0) + count
        figures = {"prompt_tokens": self._prompt_tokens, "cached_tokens": self._cached_tokens, "index": index}
        if self._is_stream and count:
            chunk = vllm.GenerateStreamChunk(token_ids=response.token_ids, completion_tokens=count, **figures)
            _add_logprobs(chunk.output_logprobs, response)
            yield vllm.GenerateResponse(chunk=chunk)
        kept = self._outputs.setdefault(index, vllm.GenerateComplete())
        if not self._is_stream:
            kept.output_ids.extend(response.token_ids)
            _add_logprobs(kept.output_logprobs, response)
        if response.prompt_logprobs:
            _add_prompt_logprobs(kept.input_logprobs, response)
        if response.HasField("finished"):
            end = response.finished
            kept.finish_reason = _FINISH_REASONS.get(end.finish_reason, "stop")
            if end.HasField("matched_stop_string"):
                kept.matched_stop_str = end.matched_stop_string
            elif end.HasField("matched_token_id") and end.finish_reason == pb.FINISH_REASON_STOP_TOKEN:
                kept.matched_token_id = end.matched_token_id
            kept.spec_accepted_tokens, kept.spec_draft_tokens = end.timings.accepted_tokens, end.timings.drafted_tokens
            yield self._complete(index)

    def abort(self) -> Iterator[vllm.GenerateResponse]:
        """Yield the ends of all outputs that have not ended, after the request was aborted."""
        for index in range(self._num_outputs):
            kept = self._outputs.setdefault(index, vllm.GenerateComplete())
            if not kept.finish_reason:
                kept.finish_reason = "abort"
                yield self._complete(index)

    def _complete(self, index: int) -> vllm.GenerateResponse:
        kept = self._outputs[index]
        kept.prompt_tokens, kept.cached_tokens, kept.index = self._prompt_tokens, self._cached_tokens, index
        kept.completion_tokens = self._num_tokens.get(index, 0)
        return vllm.GenerateResponse(complete=kept)


def _add_logprobs(found: vllm.OutputLogProbs, response: pb.GenerateResponse) -> None:
    for token, entry in zip(response.token_ids, response.logprobs, strict=False):
        found.token_ids.append(token)
        found.token_logprobs.append(entry.logprob)
        _add_top(found.top_logprobs.add(), entry)


def _add_prompt_logprobs(found: vllm.InputLogProbs, response: pb.GenerateResponse) -> None:
    for entry in response.prompt_logprobs:
        found.token_logprobs.add(value=entry.logprob)
        _add_top(found.top_logprobs.add(), entry)


def _add_top(found: vllm.TopLogProbs, entry: pb.TokenLogprobs) -> None:
    for candidate in entry.top_logprobs:
        found.token_ids.append(candidate.token_id)
        found.values.append(candidate.logprob)
