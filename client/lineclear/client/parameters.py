"""The parameters of a request: the one table of their names, types and meanings.

`client/generate_sources.py` makes the keyword arguments of the client's calls from it (`call_params.py`), and
`cli/options.py` the flags of the command: a text beside a type is the help of a flag.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Final, Literal, TypeAlias

from .chat_messages import ChatMessage, Tool, ToolChoice
from .results import Queued

Metadata: TypeAlias = Mapping[str, str | bytes] | Sequence[tuple[str, str | bytes]]


class Unset(Enum):
    """The default of a field for which None is a value."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET

OnModelChange: TypeAlias = Literal["error", "restart"]
"""What happens to an answer whose model is replaced: it raises ModelChanged, or it starts over."""

JsonWhitespace: TypeAlias = Literal["compact", "any"]
"""Whitespace between the tokens of JSON: none, or any."""

OnQueued: TypeAlias = Callable[[Queued], object]
"""Called with the place of a request that waits in the queue. An AsyncClient awaits an awaitable that it returns."""

# A text, token ids, or the turns of a conversation.
Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatMessage] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """Ends an answer whose last tokens are one pattern of at most `max_pattern_size` tokens, `min_count` times."""

    max_pattern_size: int
    min_count: int
    min_pattern_size: int = 1


Repetition: TypeAlias = RepetitionDetection | Mapping[str, int]
EarlyStopping: TypeAlias = bool | Literal["never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters and stop conditions. Reusable for many requests.

    `SamplingParams` and `StopConditions` in `lineclear/v1/sampling.proto` have the meaning, bounds and default of
    each field. `json_schema`, `json_object`, `regex`, `choice`, `grammar`, `json_whitespace` and `constraint_start` are
    the fields of its `StructuredOutput`; give at most one of the first five.
    """

    temperature: Annotated[float | None, "0 is greedy; higher is more varied. [0, 10]"] = None
    top_k: Annotated[int | None, "Keep the k most likely tokens; 0 keeps all."] = None
    top_p: Annotated[float | None, "Keep the smallest set that reaches this probability. (0, 1]"] = None
    min_p: Annotated[float | None, "Drop tokens less likely than this share of the most likely one. [0, 1]"] = None
    repetition_penalty: Annotated[float | None, "Divides the logits of tokens seen before. [0.01, 10]"] = None
    presence_penalty: Annotated[float | None, "Subtracted from tokens already in the output. [-2, 2]"] = None
    frequency_penalty: Annotated[float | None, "Subtracted once per occurrence in the output. [-2, 2]"] = None
    logit_bias: Annotated[Mapping[int, float] | None, "Add to a token's logit."] = None
    allowed_token_ids: Annotated[Sequence[int] | None, "Sample only these tokens."] = None
    banned_token_ids: Annotated[Sequence[int] | None, "Never sample these tokens."] = None
    seed: Annotated[int | None, "The same seed gives the same answer. [0, 2**64)"] = None
    min_tokens: Annotated[int | None, "Do not stop before this many output tokens."] = None
    max_tokens: Annotated[int | None, "Max output tokens."] = None
    ignore_eos: Annotated[bool | None, "Continue after end-of-sequence."] = None
    bad_words: Annotated[Sequence[str] | None, "Never write this word."] = None
    begin_banned_token_ids: Annotated[Sequence[int] | None, "Never begin with these tokens."] = None
    forced_first_token_id: Annotated[int | None, "Begin with this token."] = None
    no_repeat_ngram_size: Annotated[int | None, "Write no sequence of so many tokens twice; 0 allows all. [0, 100]"] = (
        None
    )
    exponential_decay_start: Annotated[
        int | None, "Output tokens before `exponential_decay_factor` acts. [0, 100000]"
    ] = None
    exponential_decay_factor: Annotated[float | None, "Makes the end more likely with each token. [1, 10]"] = None
    typical_p: Annotated[float | None, "Keep tokens next to the entropy up to this probability. (0, 1]"] = None
    top_n_sigma: Annotated[float | None, "Drop logits this many deviations below the highest; 0 keeps all."] = None
    xtc_probability: Annotated[float | None, "Probability that the most likely tokens are excluded. [0, 1]"] = None
    xtc_threshold: Annotated[float | None, "Probability from which XTC excludes tokens. Default 0.1."] = None
    dynatemp_range: Annotated[float | None, "Let the temperature follow the entropy within this range. [0, 10]"] = None
    dynatemp_exponent: Annotated[float | None, "Power of the entropy for `dynatemp_range`. [0, 10]"] = None
    dry_multiplier: Annotated[float | None, "DRY: penalize what continues a repetition; 0 is off. [0, 100]"] = None
    dry_base: Annotated[float | None, "Growth of the DRY penalty. Default 1.75. [1, 10]"] = None
    dry_allowed_length: Annotated[int | None, "Shortest repetition that DRY penalizes. Default 2."] = None
    dry_penalty_last_n: Annotated[int | None, "Tokens in which DRY looks for repetitions; -1: all, the default."] = None
    dry_sequence_breakers: Annotated[Sequence[str] | None, "A repetition ends at this text."] = None
    stop: Annotated[str | Sequence[str] | None, "End before this text."] = None
    stop_regex: Annotated[str | None, "End before text that this regular expression matches."] = None
    stop_token_ids: Annotated[Sequence[int] | None, "End at one of these tokens."] = None
    eos_token_ids: Annotated[Sequence[int] | None, "End-of-sequence tokens in place of the model's."] = None
    include_stop_string: Annotated[bool | None, "Keep the stop text in the answer."] = None
    repetition_detection: Annotated[
        Repetition | None, "End where a pattern of at most SIZE tokens appears COUNT times."
    ] = None
    n: Annotated[int | None, "Number of outputs, each with a seed of its own: `seed` + index."] = None
    json_schema: Annotated[str | Mapping[str, Any] | None, "Answer with JSON of this schema."] = None
    json_object: Annotated[bool | None, "Answer with a JSON object."] = None
    regex: Annotated[str | None, "Answer with a text that this regular expression matches."] = None
    choice: Annotated[Sequence[str] | None, "Answer with one of these texts."] = None
    grammar: Annotated[str | None, "Answer with a text of this Lark grammar."] = None
    json_whitespace: Annotated[JsonWhitespace | None, "Whitespace in JSON: none, or any. Default compact."] = None
    constraint_start: Annotated[str | None, "The form begins behind this text, such as </think>."] = None
    best_of: Annotated[int | None, "Generate this many outputs and return the `n` most likely ones."] = None
    num_beams: Annotated[int | None, "Beam search with this many beams. [1, 32]"] = None
    length_penalty: Annotated[float | None, "With `num_beams`: above 0 prefers long outputs. Default 1."] = None
    early_stopping: Annotated[EarlyStopping | None, "With `num_beams`: when to stop, as in transformers."] = None

    def replace(self, **changes: Any) -> Sampling:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """A prompt and the parameters of its request."""

    prompt: Prompt
    sampling: Sampling | None = None
    truncate_prompt_tokens: Annotated[int | None, "Keep at most this many last prompt tokens."] = None
    request_id: Annotated[str | None, "Name of the request. By default the server makes one."] = None
    priority: Annotated[int | None, "0 (most urgent) to 255. Default 128."] = None
    expected_tokens: Annotated[int | None, "Output tokens to expect. Orders waiting requests."] = None
    num_speculative_tokens: Annotated[
        int | None, "Most drafts that a step verifies; 0: none. By default the server's."
    ] = None
    cache_salt: Annotated[str | None, "Share cached prefixes only with requests of this salt."] = None
    adapter: Annotated[str | None, "Name of a loaded LoRA adapter."] = None
    model: Annotated[str | None, "Name of the model that must answer."] = None
    model_fingerprint: Annotated[str | None, "Fingerprint of the model that must answer."] = None
    response_format: Any = None
    on_model_change: OnModelChange | None = None
    add_generation_prompt: bool | None = None
    tools: Sequence[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    omit_text: Annotated[bool | None, "Token ids only, no text."] = None
    logprobs: Annotated[bool | None, "Log probability of each token."] = None
    top_logprobs: Annotated[int | None, "And of this many of the most likely tokens. [0, 20]"] = None
    prompt_logprobs: Annotated[int | None, "Log probability of prompt tokens and of this many most likely. [0, 20]"] = (
        None
    )
    logprob_token_ids: Annotated[Sequence[int] | None, "And of these token ids."] = None
    echo: Annotated[bool | None, "Show the prompt before the answer."] = None
    keep_special_tokens: Annotated[bool | None, "Keep the text of special tokens."] = None
    token_timings: Annotated[bool | None, "When each token was made."] = None
    queue_position: bool | None = None
    timeout_seconds: float | Unset | None = UNSET
    tenant: Annotated[str | None, "Tenant whose share of the server it takes."] = None
    metadata: Metadata = ()
    on_queued: OnQueued | None = None
