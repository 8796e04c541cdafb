"""Validate StopConditions: what ends an answer in addition to max_tokens."""

from __future__ import annotations

from typing import Any

from lineclear.scheduler.requests.validate.violations import Violations, checked_ids, checked_texts
from lineclear.scheduler.text.stop_regex import MAX_PATTERN_BYTES, BadPattern, StopRegex
from lineclear.scheduler.text.stop_strings import RepetitionLimits, StopStrings
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import sampling_pb2

MAX_STOP_STRINGS = 8
MAX_STOP_STRING_BYTES = 64
MAX_STOP_IDS = 16
MAX_PATTERN_SIZE = 128
MAX_PATTERN_COUNT = 1000


def end_ids(request: pb.GenerateRequest, vocab: int, violations: Violations) -> tuple[frozenset[int], frozenset[int]]:
    """Return the stop tokens and the end-of-sequence tokens that the request names."""
    stop = request.stop
    if stop.eos_token_ids and request.sampling.ignore_eos:
        violations.add("stop.eos_token_ids", "must be empty with sampling.ignore_eos")
    stop_ids = checked_ids("stop.token_ids", stop.token_ids, MAX_STOP_IDS, vocab, violations)
    eos_ids = checked_ids("stop.eos_token_ids", stop.eos_token_ids, MAX_STOP_IDS, vocab, violations)
    return frozenset(stop_ids), frozenset(eos_ids)


def text_options(stop: sampling_pb2.StopConditions, violations: Violations) -> dict[str, Any]:
    """Return the options of AnswerText for ends in the text."""
    return {
        "stops": _stops(stop, violations),
        "repetition": _repetition(stop, violations),
        "include_stop_string": stop.include_stop_string,
    }


def _stops(stop: sampling_pb2.StopConditions, violations: Violations) -> StopStrings | StopRegex | None:
    strings = checked_texts("stop.strings", stop.strings, MAX_STOP_STRINGS, MAX_STOP_STRING_BYTES, violations)
    if not stop.HasField("regex"):
        return StopStrings(strings) if strings else None
    if stop.strings:
        violations.add("stop.regex", "must be unset with stop.strings")
    elif not 1 <= len(stop.regex.encode()) <= MAX_PATTERN_BYTES:
        violations.add("stop.regex", f"must have 1 to {MAX_PATTERN_BYTES} bytes")
    else:
        try:
            return StopRegex(stop.regex)
        except BadPattern as error:
            violations.add("stop.regex", str(error))
    return None


def _repetition(stop: sampling_pb2.StopConditions, violations: Violations) -> RepetitionLimits | None:
    if not stop.HasField("repetition_detection"):
        return None
    given, path = stop.repetition_detection, "stop.repetition_detection"
    least = given.min_pattern_size if given.HasField("min_pattern_size") else 1
    if not 1 <= given.max_pattern_size <= MAX_PATTERN_SIZE:
        violations.add(f"{path}.max_pattern_size", f"must be in [1, {MAX_PATTERN_SIZE}]")
    elif not 1 <= least <= given.max_pattern_size:
        violations.add(f"{path}.min_pattern_size", "must be in [1, max_pattern_size]")
    if not 2 <= given.min_count <= MAX_PATTERN_COUNT:
        violations.add(f"{path}.min_count", f"must be in [2, {MAX_PATTERN_COUNT}]")
    return RepetitionLimits(given.max_pattern_size, least, given.min_count)
