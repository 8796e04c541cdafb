"""Checks of a result: the tokens, scores and vectors that it reports, and the requests that end with it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import Any

from simulation.invariant_error import InvariantViolated, require
from simulation.model_sequence import ModelSequence
from simulation.model_state import ModelState
from simulation.model_workers import ModelStep
from simulation.scenario import is_bad
from support.events import TokensReady, flat

from lineclear.errors import InternalError, NonFiniteLogits, NoTokenAllowed
from lineclear.scheduler.core.events import Event, Failed, Finished, FinishReason, Pooled, Preempted, Scored
from lineclear.wire.messages import Logprobs, RowOutput, Scores, StepResult


class ResultChecks:
    """Checks each result against the model and applies it."""

    def __init__(self, state: ModelState, vocab_size: int, bad_per_mille: int) -> None:
        self.state, self.vocab_size, self.bad_per_mille = state, vocab_size, bad_per_mille

    def on_apply(self, result: StepResult, now: float, events: list[Event]) -> None:
        worker = self.state.workers[result.epoch]
        step = worker.inflight.popleft()
        require(result.step == step.step, "I9", "results in the order of plans")
        worker.cadence.on_result(step, result)
        sampling = [i for i, (*_, output) in enumerate(step.outputs) if output is RowOutput.SAMPLE]
        counts = result.counts or (1,) * len(sampling)
        drafted = result.num_drafted or (0,) * len(sampling)
        owners = [i for i, count in zip(sampling, counts, strict=True) for _ in range(count)]
        tokens = zip(owners, result.tokens, strict=True)
        unsampled = result.stuck_rows | result.deferred_rows
        bad_rows = {i for i, token in tokens if i not in unsampled and not 0 <= token < self.vocab_size}
        bad_rows |= result.bad_rows
        tainted = {step.outputs[i][:2] for i in bad_rows}
        readers = worker.blocks.readers(tainted)
        wanted: list[object] = self._restart(readers)
        ends = list(accumulate(counts))
        for index, sequence in enumerate(step.samples):
            sequence.in_flight -= 1
            if not sequence.is_live or sequence.num_void:
                self.state.counters.wasted_samples += 1
                if sequence.is_live:
                    sequence.num_void, sequence.num_known = sequence.num_void - 1, sequence.num_known - 1
                continue
            bad = sampling[index] in result.bad_rows
            request_id = sequence.request.request_id
            if sampling[index] in bad_rows:
                worker.blocks.taint(sequence)
                self.state.remove(sequence)
                self.state.counters.requests_failed += 1
                wanted.append((Failed, request_id, NonFiniteLogits if bad else InternalError, sequence.stats(now)))
                continue
            if sampling[index] in result.stuck_rows:
                require(sequence.is_stuck_now, "I20", "a request is stuck where its grammar allows no token")
                self.state.remove(sequence)
                self.state.counters.requests_failed += 1
                wanted.append((Failed, request_id, NoTokenAllowed, sequence.stats(now)))
                continue
            if sampling[index] in result.deferred_rows:
                require(sequence.request.sampling.grammar != "", "I20", "only rows with a grammar are deferred")
                sequence.defer()
                if worker.states.is_recurrent and sequence.is_running:
                    for block in sequence.blocks[sequence.num_planned // worker.blocks.size :]:
                        worker.states.drop(block)
                    sequence.state_at = min(sequence.state_at, sequence.num_planned)
                self.state.counters.wasted_samples += 1
                continue
            first_output = sequence.num_outputs
            for place in range(ends[index] - counts[index], ends[index]):
                if sequence.num_outputs == len(sequence.answer) > first_output:
                    break  # tokens behind the end of the answer are dropped
                logprobs = result.logprobs[place] if result.logprobs else None
                wanted.append(self._token(sequence, result.tokens[place], logprobs))
            num_accepted = sequence.num_outputs - first_output - 1  # without those behind the end of the answer
            sequence.num_known += num_accepted
            if sequence in step.drafting:
                self._count_drafts(sequence, drafted[index], num_accepted)
            if sequence.num_drafts:
                sequence.num_drafts, sequence.num_planned = 0, sequence.num_known - 1
            sequence.first_token_at = now if sequence.first_token_at is None else sequence.first_token_at
            sequence.last_token_at, sequence.last_step = now, step.step
        wanted += self._reports(step, result, now)
        worker.blocks.resolve_pending(step.step, tainted | readers)
        for sequence, admission, end in step.rows:
            if sequence.is_running and sequence.admission_count == admission:
                is_deferred = sequence.num_void > 0 or end > sequence.num_planned
                end = sequence.num_computed if is_deferred else end
                worker.blocks.publish(sequence, sequence.num_planned if sequence in step.drafting else end)
        # Requests may end in any order, but blocks must be released in that order.
        order = {event.request_id: place for place, event in enumerate(events) if isinstance(event, Finished)}
        owners = [sequence for sequence, *_ in step.outputs]
        by_end = sorted(owners, key=lambda sequence: order.get(sequence.request.request_id, len(order)))
        wanted += [event for sequence in by_end if (event := self._finish(sequence, now)) is not None]
        for sequence in self.state.live.values():
            if sequence.crash_count and sequence.num_computed >= sequence.clear_position:
                sequence.crash_count = sequence.clear_position = 0
                sequence.isolated_losses.clear()
        require_same(_sorted_by_kind(events), _sorted_by_kind(wanted))
        kinds = [_kind(event) for event in flat(events)]
        require(kinds == sorted(kinds), "I10", "the end of a request comes after its tokens")

    def _count_drafts(self, sequence: ModelSequence, num_drafted: int, num_accepted: int) -> None:
        require(num_accepted <= num_drafted, "I20", "no more drafts accepted than verified")
        sequence.drafted_tokens += num_drafted
        sequence.accepted_tokens += num_accepted
        self.state.counters.spec_decode_num_drafts += num_drafted > 0
        self.state.counters.spec_decode_num_draft_tokens += num_drafted
        self.state.counters.spec_decode_num_accepted_tokens += num_accepted

    def _token(self, sequence: ModelSequence, token: int, logprobs: Logprobs | None) -> TokensReady:
        """Check the next token of an answer and return its event."""
        index = sequence.num_outputs
        context = (*sequence.request.prompt, *sequence.answer[:index])
        require(not is_bad(context, self.bad_per_mille), "I20", "bad logits are found")
        right = index < len(sequence.answer) and token == sequence.answer[index]
        require(right, "I20", "the answer is that of the request alone")
        is_requested = sequence.request.sampling.logprobs >= 0
        require((logprobs is not None) == is_requested, "I24", "logprobs exactly if requested")
        sequence.num_outputs += 1
        self.state.counters.generation_tokens += sequence.request.queued_since is None
        return TokensReady(sequence.request.request_id, index, (token,), () if logprobs is None else (logprobs,))

    def _reports(self, step: ModelStep, result: StepResult, now: float) -> list[object]:
        """Return the events of the scores and vectors of a result, each position once."""
        wanted: list[object] = []
        scores, vectors = iter(result.scores), iter(result.vectors)
        for index, (sequence, admission, start, end, output) in enumerate(step.outputs):
            if output is RowOutput.SAMPLE:
                continue
            value: Scores | bytes = next(scores) if output is RowOutput.SCORE else next(vectors)
            if not sequence.is_live or admission <= sequence.void_admission:
                continue
            request, context = sequence.request, sequence.request.prompt[:end]
            if index in result.bad_rows:
                if sequence.is_running:  # on another worker, perhaps, since the row was planned
                    self.state.workers[sequence.epoch].blocks.taint(sequence)
                self.state.remove(sequence)
                self.state.counters.requests_failed += 1
                wanted.append((Failed, request.request_id, NonFiniteLogits, sequence.stats(now)))
                continue
            sequence.last_step = step.step
            require(not is_bad(context, self.bad_per_mille), "I20", "values that are not finite are found")
            if isinstance(value, bytes):
                if end == len(request.prompt):
                    require(value == sequence.vector, "I20", "the vector is that of the request alone")
                    sequence.is_pooled = True
                    wanted.append(Pooled(request.request_id, value))
                continue
            right = sequence.scores[start - sequence.first_scored : end - sequence.first_scored]
            require(value == _joined(right), "I20", "the scores are those of the request alone")
            if end > sequence.scored_to:
                first = sequence.scored_to
                sequence.num_scores = end - sequence.first_scored
                wanted.append(Scored(request.request_id, first, _joined(right[first - start :])))
        return wanted

    def _restart(self, readers: Collection[tuple[ModelSequence, int]]) -> list[object]:
        """Restart the requests that share blocks of a bad row: what they computed since then is void."""
        wanted: list[object] = []
        for sequence, admission in sorted(readers, key=lambda entry: entry[0].queue_key):
            if sequence.is_live and sequence.admission_count == admission:
                if sequence.is_running:
                    self.state.preempt(sequence)
                    wanted.append(Preempted(sequence.request.request_id))
                sequence.num_void, sequence.void_admission = sequence.in_flight, admission
                sequence.max_computed_before = min(sequence.max_computed_before, len(sequence.tokens))
        return wanted

    def _finish(self, sequence: ModelSequence, now: float) -> Finished | None:
        if not sequence.request.max_tokens:
            return self._finish_without_output(sequence, now)
        if not sequence.is_live or sequence.num_outputs < len(sequence.answer) or sequence.is_stuck_now:
            return None
        require(sequence.is_complete, "I20", "the scores of a prompt come before its answer")
        request, last = sequence.request, sequence.answer[-1]
        self.state.wait.pace.observe(sequence)
        self.state.remove(sequence)
        self.state.counters.requests_finished += 1
        if last in request.sampling.stop_ids and sequence.num_outputs > request.sampling.min_tokens:
            reason = FinishReason.STOP_EOS if last in request.eos_ids else FinishReason.STOP_TOKEN
            return Finished(request.request_id, reason, last, sequence.stats(now))
        require(sequence.num_outputs == request.max_tokens, "I20", "an answer ends by a stop token or by length")
        return Finished(request.request_id, FinishReason.LENGTH, None, sequence.stats(now))

    def _finish_without_output(self, sequence: ModelSequence, now: float) -> Finished | None:
        if not sequence.is_live or not (sequence.is_pooled or sequence.is_complete):
            return None
        self.state.wait.pace.observe(sequence)
        self.state.remove(sequence)
        self.state.counters.requests_finished += 1
        return Finished(sequence.request.request_id, FinishReason.NO_OUTPUT, None, sequence.stats(now))


def require_same(events: Iterable[Event], wanted: Sequence[object]) -> None:
    """Raises InvariantViolated unless the events are those that are `wanted`."""
    got = [(Failed, e.request_id, type(e.error), e.stats) if isinstance(e, Failed) else e for e in events]
    if got != list(wanted):
        is_end = any(isinstance(event, Finished | tuple) for event in (*got, *wanted))
        invariant = "I10" if is_end else "I7"
        raise InvariantViolated(invariant, f"events {got} instead of {list(wanted)}")


def _joined(scores: Sequence[Scores]) -> Scores:
    """Return the scores of single positions as one."""
    columns = (tuple(value for row in scores for value in row[field]) for field in range(3))
    return Scores(*columns)


def _kind(event: Any) -> int:
    """Return the place of an event among those of one result: tokens, scores and vectors; failures; ends."""
    return 0 if isinstance(event, TokensReady | Scored | Pooled) else 2 if isinstance(event, Finished) else 1


def _sorted_by_kind(events: Iterable[Any]) -> list[Any]:
    """Return the events of one result in a fixed order; requests are independent of each other."""
    return sorted(flat(events), key=lambda e: (_kind(e), e[1] if type(e) is tuple else e.request_id))
