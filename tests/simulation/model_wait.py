"""Model of the predicted wait: waiting requests take slots in their order, each for its expected time.

The pace is that of the answers that ended last, by the recurrence of docs/architecture.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.model_sequence import ModelSequence

from lineclear.scheduler.core.sequence import Request

if TYPE_CHECKING:
    from simulation.model_state import ModelState
    from simulation.model_workers import ModelWorker

_DECAY = 0.95
_ONE_BY_ONE = 64


class _UnknownPace(Exception):
    """No answer has ended."""


class ModelPace:
    """Seconds per prompt token and per output token."""

    def __init__(self) -> None:
        self._totals = [0.0, 0.0, 0.0, 0.0]  # seconds and tokens of prompts, then of outputs

    def observe(self, sequence: ModelSequence) -> None:
        """Count an answer that is complete, unless its request was interrupted."""
        start, first, last = sequence.started_at, sequence.first_token_at, sequence.last_token_at
        if start is None or first is None or last is None or sequence.preemptions + sequence.recoveries:
            return
        received = len(sequence.request.output)
        prompt = len(sequence.request.prompt) + received - sequence.cached_tokens
        new = (first - start, prompt, last - first, sequence.num_outputs - received - 1)
        self._totals = [total * _DECAY + value for total, value in zip(self._totals, new, strict=True)]

    def seconds(self, prompt: float, output: float) -> float:
        prompt_seconds, prompt_tokens, output_seconds, output_tokens = self._totals
        if not prompt_tokens:
            raise _UnknownPace
        of_prompt = prompt_seconds / prompt_tokens
        return of_prompt * prompt + (output_seconds / output_tokens if output_tokens else of_prompt) * output

    def run_seconds(self, request: Request) -> float:
        """Return the expected time of a request that arrives; 0 if unknown."""
        known = len(request.prompt) + len(request.output)
        try:
            return self.seconds(known, max(0, _expected_output(request) - len(request.output)))
        except _UnknownPace:
            return 0.0


class ModelWait:
    """Predicts from the model's state."""

    def __init__(self, state: ModelState) -> None:
        self._state = state
        self.pace = ModelPace()

    def seconds(self, queue_key: tuple[float, int], now: float, arriving: int = 0) -> float | None:
        """Return the predicted wait of a request with that key, which waits or is `arriving`; None if unknown."""
        waiting = sorted((*self._state.fresh, *self._state.resuming), key=lambda sequence: sequence.queue_key)
        ahead = [sequence for sequence in waiting if sequence.queue_key < queue_key]
        try:
            if self._state.limits.batching_strategy == "fixed_size":
                return self._to_batch(len(ahead), len(self._state.fresh) + arriving, waiting, now)
            return self._to_slot(ahead, waiting, now)
        except _UnknownPace:
            return None

    def _to_slot(self, ahead: list[ModelSequence], waiting: list[ModelSequence], now: float) -> float | None:
        workers = self._state.workers.values()
        if not ahead and any(worker.num_slots > len(worker.running) for worker in workers):
            return 0.0
        free: list[float] = []
        for worker in workers:
            busy = [self._left(sequence, now) for sequence in worker.running.values()]
            free += busy + [0.0] * (_capacity(worker) - len(busy))
        if not free:
            return None
        for sequence in ahead[:_ONE_BY_ONE]:
            free.sort()
            free[0] += self._whole(sequence)
        rest = len(ahead) - _ONE_BY_ONE
        return min(free) + (rest * self._mean(waiting) / len(free) if rest > 0 else 0.0)

    def _to_batch(self, ahead: int, fresh: int, waiting: list[ModelSequence], now: float) -> float | None:
        workers = self._state.workers.values()
        slots = sum(_capacity(worker) for worker in workers)
        timeout = self._state.limits.policy.fixed_size_timeout_seconds
        if not slots:
            return None
        is_full = fresh >= (ahead // slots + 1) * slots
        if not is_full and timeout is None:
            return None
        busy = [self._left(sequence, now) for worker in workers for sequence in worker.running.values()]
        seconds = max(busy, default=0.0)
        if ahead // slots:
            seconds += ahead // slots * self._mean(waiting)
        return seconds if is_full or timeout is None else max(seconds, timeout)

    def _left(self, sequence: ModelSequence, now: float) -> float:
        if sequence.first_token_at is None:
            return max(0.0, self._whole(sequence) - (now - (sequence.started_at or now)))
        return self.pace.seconds(0, _output_left(sequence))

    def _whole(self, sequence: ModelSequence) -> float:
        return self.pace.seconds(len(sequence.tokens), _output_left(sequence))

    def _mean(self, waiting: list[ModelSequence]) -> float:
        tokens = sum(len(sequence.tokens) for sequence in waiting)
        expected = sum(len(s.request.prompt) + _expected_output(s.request) for s in waiting)
        return self.pace.seconds(tokens / len(waiting), max(0, expected - tokens) / len(waiting))


def _expected_output(request: Request) -> int:
    return request.expected_tokens or request.max_tokens


def _output_left(sequence: ModelSequence) -> float:
    """Return the expected further tokens. An answer beyond its expected length goes on for half of that."""
    expected = _expected_output(sequence.request)
    left = expected - sequence.num_outputs
    return left if left > 0 else min(expected / 2, sequence.max_len - len(sequence.tokens))


def _capacity(worker: ModelWorker) -> int:
    """Return how many requests of the present size run at once."""
    running = [sequence.request for sequence in worker.running.values()]
    if len(running) < 2:
        return worker.num_slots
    blocks = [-(-(len(request.prompt) + _expected_output(request)) // worker.blocks.size) for request in running]
    fitting = int(worker.hello.num_blocks / (sum(blocks) / len(blocks)))
    return max(len(running), min(worker.num_slots, fitting))
