# Generated from parameters.py by client/generate_sources.py. Do not edit.
"""The keyword arguments of calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from .chat_messages import Tool, ToolChoice
from .parameters import EarlyStopping, JsonWhitespace, Metadata, OnModelChange, OnQueued, Repetition


class Params(TypedDict, total=False):
    """The keyword arguments of a call: the fields of `Sampling`, then those of `Request`."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    banned_token_ids: Sequence[int] | None
    seed: int | None
    min_tokens: int | None
    max_tokens: int | None
    ignore_eos: bool | None
    bad_words: Sequence[str] | None
    begin_banned_token_ids: Sequence[int] | None
    forced_first_token_id: int | None
    no_repeat_ngram_size: int | None
    exponential_decay_start: int | None
    exponential_decay_factor: float | None
    typical_p: float | None
    top_n_sigma: float | None
    xtc_probability: float | None
    xtc_threshold: float | None
    dynatemp_range: float | None
    dynatemp_exponent: float | None
    dry_multiplier: float | None
    dry_base: float | None
    dry_allowed_length: int | None
    dry_penalty_last_n: int | None
    dry_sequence_breakers: Sequence[str] | None
    stop: str | Sequence[str] | None
    stop_regex: str | None
    stop_token_ids: Sequence[int] | None
    eos_token_ids: Sequence[int] | None
    include_stop_string: bool | None
    repetition_detection: Repetition | None
    n: int | None
    json_schema: str | Mapping[str, Any] | None
    json_object: bool | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None
    json_whitespace: JsonWhitespace | None
    constraint_start: str | None
    best_of: int | None
    num_beams: int | None
    length_penalty: float | None
    early_stopping: EarlyStopping | None
    truncate_prompt_tokens: int | None
    request_id: str | None
    priority: int | None
    expected_tokens: int | None
    num_speculative_tokens: int | None
    cache_salt: str | None
    adapter: str | None
    model: str | None
    model_fingerprint: str | None
    response_format: Any
    on_model_change: OnModelChange | None
    add_generation_prompt: bool | None
    tools: Sequence[Tool] | None
    tool_choice: ToolChoice | None
    parallel_tool_calls: bool | None
    omit_text: bool | None
    logprobs: bool | None
    top_logprobs: int | None
    prompt_logprobs: int | None
    logprob_token_ids: Sequence[int] | None
    echo: bool | None
    keep_special_tokens: bool | None
    token_timings: bool | None
    queue_position: bool | None
    timeout_seconds: float | None
    tenant: str | None
    metadata: Metadata
    on_queued: OnQueued | None
