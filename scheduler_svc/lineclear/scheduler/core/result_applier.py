"""Applies the result of a step: appends its tokens, publishes full blocks, and finds the ends."""

from __future__ import annotations

from lineclear.errors import InternalError, LineclearError, NonFiniteLogits
from lineclear.scheduler.core.events import Event, FinishReason
from lineclear.scheduler.core.inflight_step import BadResult, InflightStep, ResultTokens
from lineclear.scheduler.core.live_requests import LiveRequests
from lineclear.scheduler.core.sequence import Sequence, State
from lineclear.scheduler.core.shared_state import SharedState
from lineclear.scheduler.core.worker_state import WorkerState
from lineclear.wire.messages import StepResult


class ResultApplier:
    """Applies results to the state of a core."""

    def __init__(self, state: SharedState, live: LiveRequests) -> None:
        self._state = state
        self._live = live

    def apply(self, result: StepResult, now: float) -> list[Event]:
        """Apply the result of the oldest step in flight. Raises BadResult, and then nothing was applied."""
        worker = self._state.workers.get(result.epoch)
        inflight = worker.inflight[0] if worker is not None and worker.inflight else None
        if worker is None or inflight is None or result.step != inflight.step:
            raise BadResult(f"step {result.step} is not the oldest in flight")
        inflight.check(result)
        worker.inflight.popleft()
        worker.step_time.observe(inflight.num_tokens, inflight.kv_tokens, result.step_seconds)
        tokens, failures, batch = ResultTokens(result), list[Event](), worker.batch
        bad = _bad_samples(result, worker.hello.vocab_size)
        bad_owners: dict[Sequence, int] = {}
        restarted: list[Event] = []
        if bad:
            bad_owners = {s: s.admission_count for row, s in enumerate(inflight.sampled()) if row in bad}
            restarted = self._restart_readers(worker, bad_owners)
        candidates = self._append_tokens(result, worker, inflight, bad, tokens, failures, now)
        for sequence in inflight.completing_block:
            if sequence.state is State.RUNNING:
                if sequence.in_decode_batch:
                    batch.decode_batch.sync(sequence)
                batch.publish(sequence)
        for sequence, admission, end in inflight.chunk_rows:
            if sequence.admission_count == admission and sequence.state is State.RUNNING:
                sequence.num_computed = end
                batch.publish(sequence)
        batch.resolve_pending(inflight.step, bad_owners)
        events = [*tokens.event(), *restarted, *failures, *self._finish_complete(candidates, now)]
        if self._state.poison:
            self._clear_suspects()
        return events

    def _restart_readers(self, worker: WorkerState, bad: dict[Sequence, int]) -> list[Event]:
        """Have the sequences that share blocks of `bad` rows computed again, and add them to `bad`.

        What they computed and sampled from these blocks is void, also if it is not finite itself: so no request fails
        for the values of another.
        """
        events: list[Event] = []
        for sequence in worker.batch.add_readers(bad):
            if sequence.state is State.FINISHED:
                continue
            if sequence.state is State.RUNNING:
                events.append(self._state.preempt(worker, sequence))
            sequence.num_void = sequence.in_flight
            sequence.max_computed_before = min(sequence.max_computed_before, len(sequence.tokens))
        return events

    def _append_tokens(
        self,
        result: StepResult,
        worker: WorkerState,
        inflight: InflightStep,
        bad: frozenset[int],
        tokens: ResultTokens,
        failures: list[Event],
        now: float,
    ) -> list[Sequence]:
        """Append the sampled tokens; return the sequences whose answer may be complete.

        Sequences that stayed in the decode batch since this step are appended in bulk. Sequences that left it are
        handled one by one, like prefill chunks. Tokens of sequences preempted in the meantime are valid.
        """
        rows, batch, counters = inflight.decode_rows.sequences, worker.batch, self._state.counters
        for row in bad:
            if row < len(rows) and rows[row].in_decode_batch:
                batch.leave_decode(rows[row])  # before on_result: this sample is not one of its tokens
        left = batch.decode_batch.left_since(inflight.decode_rows, inflight.decode_step)
        candidates = []
        if rows:
            batch.decode_batch.on_result(inflight.decode_step, inflight.step, now)
            candidates = tokens.add_decode_rows(inflight, left)
            counters.generation_tokens += len(rows) - len(left)
        singles = [(row, rows[row]) for row in left]
        for row, sequence in (*singles, *enumerate(inflight.chunk_samples, len(rows))):
            if sequence.state is State.FINISHED:
                counters.wasted_samples += 1
            elif sequence.num_void:
                sequence.num_void -= 1
                sequence.num_known -= 1
                counters.wasted_samples += 1
            elif row in bad:
                counters.requests_failed += 1
                failures.append(self._live.fail(sequence, _bad_row(row in result.bad_rows), now, tainted=True))
            else:
                tokens.add(sequence, row)
                self._append_one(sequence, inflight.step, now)
                candidates.append(sequence)
        return candidates

    def _append_one(self, sequence: Sequence, step: int, now: float) -> None:
        """Account for a token of a sequence that is not in the decode batch, or was not when the token was planned."""
        if sequence.state is State.WAITING:
            self._state.resuming.grow(sequence)
        else:
            sequence.num_computed = len(sequence.tokens) - 1
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        sequence.last_token_at = now
        sequence.last_step = step
        self._state.counters.generation_tokens += 1

    def _finish_complete(self, candidates: list[Sequence], now: float) -> list[Event]:
        """Finish the sequences whose last token completes the answer."""
        events: list[Event] = []
        for sequence in candidates:
            request, token = sequence.request, sequence.tokens[-1]
            if token in sequence.stop_token_ids and sequence.num_outputs > request.sampling.min_tokens:
                reason = FinishReason.STOP_EOS if token in request.eos_ids else FinishReason.STOP_TOKEN
                events.append(self._live.complete(sequence, reason, token, now))
            elif len(sequence.tokens) >= sequence.max_len:
                events.append(self._live.complete(sequence, FinishReason.LENGTH, None, now))
        return events

    def _clear_suspects(self) -> None:
        for sequence in self._state.poison:
            if sequence.in_decode_batch:
                self._state.workers[sequence.epoch].batch.decode_batch.sync(sequence)
        self._state.poison.clear_passed()


def _bad_samples(result: StepResult, vocab_size: int) -> frozenset[int]:
    """Return the samples whose logits were not finite or whose token is not in the vocabulary."""
    tokens = result.tokens
    if not tokens or 0 <= min(tokens) <= max(tokens) < vocab_size:
        return result.bad_rows
    return result.bad_rows | {row for row, token in enumerate(tokens) if not 0 <= token < vocab_size}


def _bad_row(non_finite: bool) -> LineclearError:
    if non_finite:
        return NonFiniteLogits("the model produced a value that is not finite for this request")
    return InternalError("the worker sampled a token that is not in the vocabulary")
