"""Validate the tokens and the fingerprints that a resumed request names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lineclear.errors import InvalidRequest
from lineclear.scheduler.requests.validate.violations import Violations, checked_ids
from lineclear.v1 import inference_pb2 as pb
from lineclear.wire.messages import Sampling

MAX_FINGERPRINT = 64
_MAX_CHAT_TIME_US = 253_402_300_800_000_000  # the year 10000
_FINGERPRINT = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_FINGERPRINT}}}")


def received(
    request: pb.GenerateRequest,
    num_outputs: int,
    sampling: Sampling,
    context_length: int,
    vocab_size: int,
    violations: Violations,
) -> tuple[tuple[int, ...] | None, ...]:
    """Return the tokens that each output begins with, None for one that is complete."""
    if sampling.temperature != 0 and not request.sampling.HasField("seed"):
        violations.add("sampling.seed", "is required with resume; send the seed from Started")

    ends = frozenset(sampling.stop_ids)

    def checked(path: str, ids: Sequence[int]) -> tuple[int, ...]:
        tokens = checked_ids(path, ids, context_length, vocab_size, violations)
        if not ends.isdisjoint(tokens[sampling.min_tokens : -1]):
            violations.add(path, "has tokens after a token that ends the answer")
        return tokens

    resume = request.resume
    if num_outputs == 1:
        if resume.outputs:
            violations.add("resume.outputs", "must be empty, because sampling.n is 1")
        return (checked("resume.token_ids", resume.token_ids),)
    if resume.token_ids:
        violations.add("resume.token_ids", "must be empty, because sampling.n is above 1; send resume.outputs")
    if len(resume.outputs) != num_outputs:
        violations.add("resume.outputs", f"has {len(resume.outputs)} entries; send sampling.n, which is {num_outputs}")
    elif all(output.is_complete for output in resume.outputs):
        violations.add("resume.outputs", "are all complete; nothing is left to resume")
    return tuple(
        None if output.is_complete else checked(f"resume.outputs[{index}].token_ids", output.token_ids)
        for index, output in enumerate(resume.outputs)
    )


def check_length(received: Sequence[Sequence[int] | None], max_tokens: int) -> None:
    """Raises InvalidRequest for an output that has more tokens than the answer may have."""
    for index, tokens in enumerate(received):
        if tokens is not None and len(tokens) > max_tokens:
            path = "resume" if len(received) == 1 else f"resume.outputs[{index}]"
            description = f"has more entries than max_tokens, which is {max_tokens} here"
            raise InvalidRequest.at(f"{path}.token_ids", description)


def model_fingerprint(request: pb.GenerateRequest, violations: Violations) -> str:
    """Return the fingerprint of the required model; empty if the request names none."""
    named = [("model_fingerprint", request.model_fingerprint)] if request.HasField("model_fingerprint") else []
    if request.HasField("resume"):
        named.append(("resume.model_fingerprint", request.resume.model_fingerprint))
        if len(request.resume.prompt_digest) > MAX_FINGERPRINT or not request.resume.prompt_digest.isascii():
            violations.add("resume.prompt_digest", "must be the value from Started")
        if not 0 <= request.resume.chat_time_us < _MAX_CHAT_TIME_US:
            violations.add("resume.chat_time_us", "must be the value from Started")
    for path, value in named:
        if not _FINGERPRINT.fullmatch(value):
            missing = "is required with resume; send the fingerprint from Started"
            violations.add(path, "must be the fingerprint from GetModel or Started" if value else missing)
    if len({value for _, value in named}) > 1:
        violations.add("model_fingerprint", "differs from resume.model_fingerprint")
    return named[-1][1] if named else ""
