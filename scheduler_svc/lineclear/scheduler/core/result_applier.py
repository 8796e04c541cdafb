"""Applies the result of a step: appends its tokens, publishes full blocks, and finds the ends."""

from __future__ import annotations

from lineclear.errors import InternalError, LineclearError, NonFiniteLogits, NoTokenAllowed
from lineclear.scheduler.core.core_state import LiveRequests, SharedState, WorkerState
from lineclear.scheduler.core.events import Event, FinishReason, Pooled, Scored
from lineclear.scheduler.core.inflight_step import BadResult, ChunkRow, InflightStep, ResultTokens
from lineclear.scheduler.core.sequence import Sequence, State
from lineclear.wire.messages import RowOutput, Scores, StepResult

_SAMPLE = RowOutput.SAMPLE


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
        computed = inflight.computed(result)
        if inflight.has_drafts or worker.batch.decode_batch.resting:
            self._observe_time(result, worker, inflight, now)
        worker.last_result_at = now
        worker.step_time.observe(*computed, result.step_seconds - result.draft_seconds, inflight.num_scored)
        tokens, failures, batch = ResultTokens(result), list[Event](), worker.batch
        bad = _bad_rows(result, inflight, worker.hello.vocab_size)
        bad_owners: dict[Sequence, int] = {}
        restarted: list[Event] = []
        if bad:
            bad_owners = {s: count for row, (s, count) in enumerate(inflight.output_owners()) if row in bad}
            restarted = self._restart_readers(worker, bad_owners)
        failed = bad | result.stuck_rows if result.stuck_rows else bad
        candidates = self._append_tokens(result, worker, inflight, failed, tokens, failures, now)
        reports: list[Event] = []
        if result.scores or result.vectors:
            reports = self._report(result, inflight, bad, candidates, failures, now)
        for sequence in inflight.completing_block:
            if sequence.state is State.RUNNING:
                if sequence.in_decode_batch:
                    batch.decode_batch.sync(sequence)
                batch.publish(sequence)
        for row in inflight.chunk_rows:
            sequence = row.sequence
            if sequence.admission_count == row.admission_count and sequence.state is State.RUNNING:
                # Otherwise it is computed as far as its drafts were accepted, or up to the position that was deferred.
                if not (row.num_drafts or sequence.num_void or row.end > sequence.num_planned):
                    sequence.num_computed = row.end
                batch.publish(sequence)
        batch.resolve_pending(inflight.step, bad_owners)
        events = [*tokens.event(), *reports, *restarted, *failures, *self._finish_complete(candidates, now)]
        if self._state.poison.suspects:
            self._clear_suspects()
        return events

    def _observe_time(self, result: StepResult, worker: WorkerState, inflight: InflightStep, now: float) -> None:
        """Measure the time from result to result with and without drafts."""
        began_at, has_drafts = worker.last_result_at if inflight.is_ahead else inflight.planned_at, inflight.has_drafts
        if has_drafts or inflight.is_ahead or self._state.limits.pipeline_depth == 1:
            worker.draft_costs.observe_step(result, now - began_at, has_drafts=has_drafts)

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
            sequence.void_admission = sequence.admission_count
            sequence.max_computed_before = min(sequence.max_computed_before, len(sequence.tokens))
        return events

    def _append_tokens(
        self,
        result: StepResult,
        worker: WorkerState,
        inflight: InflightStep,
        failed: frozenset[int],
        tokens: ResultTokens,
        failures: list[Event],
        now: float,
    ) -> list[Sequence]:
        """Append the sampled tokens; return the sequences whose answer may be complete.

        Sequences that stayed in the decode batch since this step are appended in bulk. Sequences that left it are
        handled one by one, like prefill chunks. Tokens of sequences preempted in the meantime are valid.
        """
        without_token = failed | result.deferred_rows if result.deferred_rows else failed
        left, candidates = self._append_decode_rows(worker, inflight, without_token, tokens, now)
        rows, counters = inflight.decode_rows.sequences, self._state.counters
        singles = [(row, row, 1, rows[row]) for row in left]  # output, first token, number of tokens, sequence
        if inflight.chunk_rows:
            singles += _sampling_chunks(result, inflight)
        accepted: dict[Sequence, int] = {}
        for row, first, count, sequence in singles:
            if sequence.state is State.FINISHED:
                counters.wasted_samples += 1
            elif sequence.num_void:
                sequence.num_void -= 1
                sequence.num_known -= 1
                counters.wasted_samples += 1
            elif row in failed:
                counters.requests_failed += 1
                failures.append(self._fail(sequence, row, result, now))
            elif row in result.deferred_rows:
                self._defer(worker, sequence)
            else:
                accepted[sequence] = self._append_row(sequence, tokens, range(first, first + count), inflight.step, now)
                candidates.append(sequence)
        if inflight.has_drafts:
            self._observe_drafts(result, worker, inflight, accepted)
        return candidates

    def _append_decode_rows(
        self,
        worker: WorkerState,
        inflight: InflightStep,
        without_token: frozenset[int],
        tokens: ResultTokens,
        now: float,
    ) -> tuple[list[int], list[Sequence]]:
        """Append the tokens of the decode batch; return the rows that left it, and sequences that may be complete."""
        rows, batch = inflight.decode_rows.sequences, worker.batch
        for row in without_token:
            if row < len(rows) and rows[row].in_decode_batch:
                batch.leave_decode(rows[row])  # before on_result: this sample is not one of its tokens
        left = batch.decode_batch.left_since(inflight.decode_rows, inflight.decode_step)
        if not rows:
            return left, []
        batch.decode_batch.on_result(inflight.decode_step, inflight.step, now)
        self._state.counters.generation_tokens += len(rows) - len(left)
        return left, tokens.add_decode_rows(inflight, left)

    def _defer(self, worker: WorkerState, sequence: Sequence) -> None:
        """Drop the oldest sample in flight of a sequence, and the later ones, which lack its token.

        Behind their results its last known position is planned again. Recurrent states of later ones are of no use.
        """
        if sequence.in_decode_batch:
            worker.batch.leave_decode(sequence)
        sequence.num_known -= 1
        sequence.num_void = sequence.in_flight
        sequence.max_computed_before = min(sequence.max_computed_before, len(sequence.tokens))
        self._state.counters.wasted_samples += 1
        if sequence.state is State.RUNNING:
            sequence.num_drafts = 0
            sequence.num_planned = sequence.num_computed = len(sequence.tokens) - 1
            worker.batch.drop_later_states(sequence)

    def _fail(self, sequence: Sequence, row: int, result: StepResult, now: float) -> Event:
        if row in result.stuck_rows and row not in result.bad_rows:
            return self._live.fail(sequence, _stuck_row(), now)
        return self._live.fail(sequence, _bad_row(row in result.bad_rows), now, tainted=True)

    def _observe_drafts(
        self, result: StepResult, worker: WorkerState, inflight: InflightStep, accepted: dict[Sequence, int]
    ) -> None:
        """Count the drafts that were verified for the sequences in `accepted`, and those that are in their answers."""
        counters, rows = self._state.counters, inflight.chunks_with(_SAMPLE)
        drafted = result.num_drafted[len(inflight.decode_rows.sequences) :] or (0,) * len(rows)
        for row, num_drafted in zip(rows, drafted, strict=True):
            sequence = row.sequence
            if row.num_drafts and sequence in accepted:
                num_accepted = accepted[sequence]
                sequence.drafted_tokens += num_drafted
                sequence.accepted_tokens += num_accepted
                counters.spec_decode_num_drafts += num_drafted > 0
                counters.spec_decode_num_draft_tokens += num_drafted
                counters.spec_decode_num_accepted_tokens += num_accepted
                worker.draft_costs.observe_row(sequence, row.num_drafts, num_drafted, num_accepted)

    def _append_row(self, sequence: Sequence, tokens: ResultTokens, samples: range, step: int, now: float) -> int:
        """Append the samples of a row up to the end of the answer. Return how many of them were drafts."""
        for sample in samples:
            tokens.add(sequence, sample)
            self._append_one(sequence, step, now)
            if len(samples) > 1 and sequence.has_stopped:
                break  # plain decoding would not have sampled the tokens behind
        num_accepted = sample - samples.start
        sequence.num_known += num_accepted
        if sequence.num_drafts:
            sequence.num_drafts, sequence.num_planned = 0, sequence.num_known - 1
        return num_accepted

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
        if not sequence.request.is_search_step:  # a search uses the log probabilities, not the sample
            self._state.counters.generation_tokens += 1

    def _report(
        self,
        result: StepResult,
        inflight: InflightStep,
        bad: frozenset[int],
        candidates: list[Sequence],
        failures: list[Event],
        now: float,
    ) -> list[Event]:
        """Return the events of scores and vectors; add the sequences that are complete with them to `candidates`.

        Those of sequences preempted in the meantime are valid, unless they were computed from non-finite values.
        """
        events: list[Event] = []
        scores, vectors = iter(result.scores), iter(result.vectors)
        for index, row in enumerate(inflight.outputs(), len(inflight.decode_rows.sequences)):
            if row.output is _SAMPLE:
                continue
            sequence = row.sequence
            value = next(scores) if row.output is RowOutput.SCORE else next(vectors)
            if sequence.state is State.FINISHED or row.admission_count <= sequence.void_admission:
                continue
            if index in bad:
                self._state.counters.requests_failed += 1
                failures.append(self._live.fail(sequence, _bad_row(non_finite=True), now, tainted=True))
            else:
                events += _scored(row, value) if isinstance(value, Scores) else _pooled(row, value)
                sequence.last_step = inflight.step
                if _is_complete(row):
                    candidates.append(sequence)
        return events

    def _finish_complete(self, candidates: list[Sequence], now: float) -> list[Event]:
        events: list[Event] = []
        for sequence in candidates:
            request, token = sequence.request, sequence.tokens[-1]
            if not request.max_tokens:
                events.append(self._live.complete(sequence, FinishReason.NO_OUTPUT, None, now))
            elif sequence.has_stopped:
                reason = FinishReason.STOP_EOS if token in request.eos_ids else FinishReason.STOP_TOKEN
                events.append(self._live.complete(sequence, reason, token, now))
            elif len(sequence.tokens) >= sequence.max_len:
                events.append(self._live.complete(sequence, FinishReason.LENGTH, None, now))
        return events

    def _clear_suspects(self) -> None:
        for sequence in self._state.poison.suspects:
            if sequence.in_decode_batch:
                self._state.workers[sequence.epoch].batch.decode_batch.sync(sequence)
        self._state.poison.clear_passed()


def _sampling_chunks(result: StepResult, inflight: InflightStep) -> list[tuple[int, int, int, Sequence]]:
    """Return output, first token, number of tokens and sequence of the chunks that sample."""
    first = num_decodes = len(inflight.decode_rows.sequences)
    chunks = [(row, x.sequence) for row, x in enumerate(inflight.outputs(), num_decodes) if x.output is _SAMPLE]
    counts = result.counts[num_decodes:] or (1,) * len(chunks)
    found = []
    for (row, sequence), count in zip(chunks, counts, strict=True):
        found.append((row, first, count, sequence))
        first += count
    return found


def _bad_rows(result: StepResult, inflight: InflightStep, vocab_size: int) -> frozenset[int]:
    """Return the outputs whose values were not finite or whose token is not in the vocabulary."""
    tokens = result.tokens
    if not tokens or 0 <= min(tokens) <= max(tokens) < vocab_size:
        return result.bad_rows
    decodes = len(inflight.decode_rows.sequences)
    sampling = [*range(decodes), *(i for i, x in enumerate(inflight.outputs(), decodes) if x.output is _SAMPLE)]
    counts = result.counts or (1,) * len(sampling)
    rows = [row for row, count in zip(sampling, counts, strict=True) for _ in range(count)]
    outside = {row for row, token in zip(rows, tokens, strict=True) if not 0 <= token < vocab_size}
    return result.bad_rows | (outside - result.stuck_rows - result.deferred_rows)  # their tokens mean nothing


def _is_complete(row: ChunkRow) -> bool:
    """Return whether the request has no output and this row was the last that it needs."""
    if row.output is RowOutput.POOL:
        return row.has_vector
    return not (row.sequence.request.max_tokens or row.sequence.has_scores_left)


def _scored(row: ChunkRow, scores: Scores) -> list[Event]:
    """Return the event of the scores that were not reported yet: another admission may have had some of them."""
    sequence = row.sequence
    first = sequence.num_scored
    assert row.start <= first, "a position without a score"
    if row.end <= first:
        return []
    sequence.num_scored = row.end
    return [Scored(sequence.request.request_id, first, scores.behind(first - row.start))]


def _pooled(row: ChunkRow, vector: bytes) -> list[Event]:
    return [Pooled(row.sequence.request.request_id, vector)] if row.has_vector else []


def _stuck_row() -> LineclearError:
    return NoTokenAllowed(
        "the structured output and the other parameters of the request allow no further token, or the grammar is too "
        "complex at this point (more than 2,000 items of its parser for one token, or 10 s); relax or simplify the "
        "grammar, banned_token_ids, allowed_token_ids or min_tokens"
    )


def _bad_row(non_finite: bool) -> LineclearError:
    if non_finite:
        return NonFiniteLogits("the model produced a value that is not finite for this request")
    return InternalError("the worker sampled a token that is not in the vocabulary")
