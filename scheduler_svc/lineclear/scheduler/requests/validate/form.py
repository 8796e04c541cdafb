"""Validate the form of structured output, except for what only its compilation can tell."""

from __future__ import annotations

from lineclear.scheduler.requests.validate.violations import Violations
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import sampling_pb2

MAX_START_BYTES = 64
MAX_CHOICES = 4096
_PATH = "sampling.structured_output"


def check_form(params: sampling_pb2.SamplingParams, has_ends: bool, max_bytes: int, violations: Violations) -> str:
    """Return the text behind which the form begins. `has_ends`: some token can end the answer."""
    if not params.HasField("structured_output"):
        return ""
    form = params.structured_output
    kind = form.WhichOneof("form")
    if kind is None:
        violations.add(f"{_PATH}.form", "is missing: set json_schema, json_object, regex, choice or grammar")
    elif kind == "choice":
        _check_choice(form.choice, max_bytes, violations)
    elif kind == "json_object":
        if not form.json_object:
            violations.add(f"{_PATH}.json_object", "must be true")
    else:
        text = getattr(form, kind)
        if not text:
            violations.add(f"{_PATH}.{kind}", "is empty")
        _check_size(f"{_PATH}.{kind}", len(text.encode()), max_bytes, violations)
    if form.json_whitespace not in sampling_pb2.JsonWhitespace.values():
        violations.add(f"{_PATH}.json_whitespace", "must be JSON_WHITESPACE_COMPACT or JSON_WHITESPACE_ANY")
    if len(form.constraint_start.encode()) > MAX_START_BYTES:
        violations.add(f"{_PATH}.constraint_start", f"has more than {MAX_START_BYTES} bytes")
    if params.HasField("forced_first_token_id") and not form.constraint_start:
        violations.add("sampling.forced_first_token_id", f"must be unset with {_PATH} without constraint_start")
    if not has_ends:
        violations.add(_PATH, "needs a token that ends the answer: unset ignore_eos, or set stop.token_ids")
    return form.constraint_start


def check_forced(request: pb.GenerateRequest, has_ends: bool, max_bytes: int, violations: Violations) -> None:
    """Add what keeps the answer from being a call that `tool_choice` forces."""
    path = "chat.tool_choice"
    _check_size("chat.tools", sum(len(tool.parameters.encode()) for tool in request.chat.tools), max_bytes, violations)
    if request.sampling.HasField("structured_output"):
        violations.add(_PATH, f"must be unset if {path} forces a call")
    for name in ("num_beams", "forced_first_token_id"):
        if request.sampling.HasField(name) and (name != "num_beams" or request.sampling.num_beams > 1):
            violations.add(f"sampling.{name}", f"must be unset if {path} forces a call")
    if not has_ends:
        violations.add(path, "needs a token that ends the answer: unset ignore_eos, or set stop.token_ids")


def _check_choice(choice: sampling_pb2.Choice, max_bytes: int, violations: Violations) -> None:
    path = f"{_PATH}.choice.texts"
    if not choice.texts:
        violations.add(path, "is empty")
    if len(choice.texts) > MAX_CHOICES:
        violations.add(path, f"has more than {MAX_CHOICES} entries")
        return
    for index, text in enumerate(choice.texts):
        if not text:
            violations.add(f"{path}[{index}]", "is empty")
    _check_size(path, sum(len(text.encode()) for text in choice.texts), max_bytes, violations)


def _check_size(path: str, size: int, max_bytes: int, violations: Violations) -> None:
    if size > max_bytes:
        violations.add(path, f"has {size} bytes, the limit is {max_bytes} (--max-grammar-bytes)")
