"""How long requests hold their slot: seconds per prompt token and per output token, of the requests that ended last."""

from __future__ import annotations

from lineclear.scheduler.core.sequence import Request, Sequence

_DECAY = 0.95  # weight of a request, against the next one that ends


class SlotPace:
    """Decayed totals of ended requests. Preempted and recovered requests do not count: they waited in between."""

    def __init__(self) -> None:
        self._prefill_seconds = self._prefill_tokens = 0.0
        self._decode_seconds = self._decode_tokens = 0.0

    def observe(self, sequence: Sequence) -> None:
        """Count a request that has ended."""
        start, first, last = sequence.started_at, sequence.first_token_at, sequence.last_token_at
        if start is None or first is None or last is None or sequence.preemptions or sequence.recoveries:
            return
        received = len(sequence.request.output)
        self._prefill_seconds = self._prefill_seconds * _DECAY + first - start
        self._prefill_tokens = self._prefill_tokens * _DECAY + sequence.prompt_len + received - sequence.cached_tokens
        self._decode_seconds = self._decode_seconds * _DECAY + last - first
        self._decode_tokens = self._decode_tokens * _DECAY + sequence.num_outputs - received - 1

    def seconds(self, prompt_tokens: float, output_tokens: float) -> float | None:
        """Return how long a request of this size holds a slot; None before a request has ended."""
        if not self._prefill_tokens:
            return None
        per_prompt_token = self._prefill_seconds / self._prefill_tokens
        # Before an answer of two tokens has ended, an output token counts as a prompt token.
        per_output_token = self._decode_seconds / self._decode_tokens if self._decode_tokens else per_prompt_token
        return per_prompt_token * prompt_tokens + per_output_token * output_tokens

    def run_seconds(self, request: Request) -> float | None:
        """Return how long a request is expected to hold a slot; None before a request has ended."""
        known = len(request.prompt) + len(request.output)
        return self.seconds(known, max(0, request.expected_len - known))
