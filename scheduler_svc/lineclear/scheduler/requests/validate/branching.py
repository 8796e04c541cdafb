"""Validate the parameters of requests whose outputs are chosen at the end: best_of and beam search."""

from __future__ import annotations

from lineclear.errors import InvalidRequest
from lineclear.scheduler.requests.beam_search import BeamSettings, EarlyStopping
from lineclear.scheduler.requests.validate.violations import Violations
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import sampling_pb2

MAX_BEAMS = 32
_MAX_LENGTH_PENALTY = 10.0
FIELDS = frozenset({"best_of", "num_beams", "length_penalty", "early_stopping"})
"""Fields of SamplingParams that are validated here."""
_BEAM_FIELDS = frozenset(
    {"n", "num_beams", "length_penalty", "early_stopping", "min_tokens", "max_tokens", "ignore_eos", "seed"}
)
_EXCLUDED = (
    *("stop.strings", "stop.regex", "stop.repetition_detection", "output.token_timings", "output.prompt_logprobs"),
    *("output.logprob_token_ids", "resume"),
)
"""Fields that must be unset with a beam search."""
_STOPPING = {
    sampling_pb2.EARLY_STOPPING_WHEN_FULL: EarlyStopping.WHEN_FULL,
    sampling_pb2.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}


def best_of(request: pb.GenerateRequest, num_outputs: int, max_outputs: int, violations: Violations) -> int:
    """Return the number of candidates; 0 if all of them are outputs."""
    params = request.sampling
    count = params.best_of if params.HasField("best_of") else num_outputs
    if not num_outputs <= count <= max_outputs:
        violations.add("sampling.best_of", f"must be in [n, --max-outputs], here [{num_outputs}, {max_outputs}]")
    if count == num_outputs:
        return 0
    if request.HasField("resume"):
        violations.add("resume", "must be unset with sampling.best_of: its outputs arrive whole")
    if request.output.HasField("prompt_logprobs"):
        violations.add(
            "output.prompt_logprobs", "must be unset with sampling.best_of; send it with a request of its own"
        )
    if request.output.logprob_token_ids:
        violations.add("output.logprob_token_ids", "must be empty with sampling.best_of")
    return count


def beams(
    request: pb.GenerateRequest, num_outputs: int, end_ids: frozenset[int], vocab_size: int, violations: Violations
) -> BeamSettings | None:
    """Return the settings of a beam search, without the number of tokens; None without one."""
    params = request.sampling
    if params.num_beams <= 1:
        if params.HasField("length_penalty"):
            violations.add("sampling.length_penalty", "must be unset without sampling.num_beams")
        if params.early_stopping:
            violations.add("sampling.early_stopping", "must be unset without sampling.num_beams")
        if params.HasField("num_beams") and params.num_beams == 0:
            violations.add("sampling.num_beams", f"must be in [1, {MAX_BEAMS}]")
        return None
    if not num_outputs <= params.num_beams <= MAX_BEAMS:
        violations.add("sampling.num_beams", f"must be in [n, {MAX_BEAMS}], where n is {num_outputs}")
    for field, value in params.ListFields():
        if field.name not in _BEAM_FIELDS and not (field.name == "temperature" and value == 0):
            violations.add(f"sampling.{field.name}", "must be unset with sampling.num_beams")
    for path in _excluded_fields(request):
        violations.add(path, "must be unset with sampling.num_beams")
    penalty = params.length_penalty if params.HasField("length_penalty") else 1.0
    if not abs(penalty) <= _MAX_LENGTH_PENALTY:
        violations.add("sampling.length_penalty", f"must be in [-{_MAX_LENGTH_PENALTY:g}, {_MAX_LENGTH_PENALTY:g}]")
    if params.early_stopping not in sampling_pb2.EarlyStopping.values():
        violations.add("sampling.early_stopping", "must be HEURISTIC, WHEN_FULL or NEVER")
    stopping = _STOPPING.get(params.early_stopping, EarlyStopping.HEURISTIC)
    return BeamSettings(params.num_beams, 0, end_ids, penalty, stopping, params.min_tokens, vocab_size)


def _excluded_fields(request: pb.GenerateRequest) -> list[str]:
    """Return the paths of the fields outside of the sampling parameters that a beam search excludes."""
    given = {field.name for field, _ in request.ListFields()}
    for part in ("stop", "output"):
        given.update(f"{part}.{field.name}" for field, _ in getattr(request, part).ListFields())
    return [path for path in _EXCLUDED if path in given]


def check_held(count: int, has_beams: bool, max_tokens: int, max_held_tokens: int) -> None:
    """Raises InvalidRequest if `count` outputs of `max_tokens` are too much to be held until the end."""
    if count * max_tokens > max_held_tokens:
        path = "sampling.num_beams" if has_beams else "sampling.best_of"
        limit = f"the limit is {max_held_tokens}; lower it or max_tokens"
        raise InvalidRequest.at(path, f"keeps up to {count * max_tokens} tokens until the end, {limit}")
