"""Bugs to plant in results and the ends of requests. See `mutations`."""

from __future__ import annotations

from simulation.mutations import Bugs, always, boundary, drop, never, off_by_one, replace, without

from lineclear.scheduler.core import result_applier
from lineclear.scheduler.core.core_state import LiveRequests
from lineclear.scheduler.core.inflight_step import ChunkRow, InflightStep, ResultTokens
from lineclear.scheduler.core.result_applier import ResultApplier

RESULT_BUGS: Bugs = {
    ResultApplier: {
        "scores are measured as plain tokens": replace("inflight.num_scored", "0"),
        "a stuck row has a token": replace("bad | result.stuck_rows", "bad"),
        "a deferred position counts as computed": replace(
            "row.num_drafts or sequence.num_void or row.end > sequence.num_planned", "row.num_drafts"
        ),
        "the epoch of a result is not compared": replace(
            "self._state.workers.get(result.epoch)", "next(iter(self._state.workers.values()), None)"
        ),
        "the step of a result is not compared": without("result.step != inflight.step"),
        "a step in flight is removed before its result is checked": replace(
            "worker.inflight[0]", "worker.inflight.popleft()"
        ),
        "rows of an earlier admission count for this one": without("sequence.admission_count == row.admission_count"),
        "sequences that share a block of a bad row go on": replace("worker.batch.add_readers(bad)", "()"),
        "void samples are delivered": drop(
            "sequence.num_void = sequence.in_flight", after="if sequence.state is State.RUNNING:\n    events.append(_)"
        ),
        "positions with void samples count as computed": drop(
            "sequence.max_computed_before = _", after="sequence.void_admission = _"
        ),
        "void scores are reported": drop("sequence.void_admission = _"),
        "a void sample stays known": drop("sequence.num_known -= 1", after="sequence.num_void -= 1"),
        "a stuck decode stays in the decode batch": replace(
            "failed | result.deferred_rows if result.deferred_rows else failed", "result.bad_rows"
        ),
        "a deferred row has a token": never("row in result.deferred_rows"),
        "a deferred decode stays in the decode batch": replace(
            "failed | result.deferred_rows if result.deferred_rows else failed", "failed"
        ),
        "a wasted sample is not counted": drop("counters.wasted_samples += 1", times=2),
        "a bad token is appended with the others": drop("batch.leave_decode(rows[row])"),
        "rows behind a deferred one count": drop(
            "sequence.num_void = sequence.in_flight", after="sequence.num_known -= 1"
        ),
        "a deferred position is not planned again": drop("sequence.num_planned = sequence.num_computed = _"),
        "positions behind a deferred one count as computed before": drop(
            "sequence.max_computed_before = _", after="sequence.num_void = sequence.in_flight"
        ),
        "a stuck row fails with another error": never("row in result.stuck_rows"),
        "a stuck row taints its blocks": replace(
            "_1.fail(sequence, _stuck_row(), now)", "_1.fail(sequence, _stuck_row(), now, tainted=True)"
        ),
        "tokens behind the end of an answer count": never("len(samples) > 1 and sequence.has_stopped"),
        "drafts behind the end of an answer count as accepted": replace("sample - samples.start", "len(samples) - 1"),
        "accepted drafts are not known": drop("sequence.num_known += num_accepted"),
        "accepted drafts are computed again": replace("sequence.num_known - 1", "sequence.num_planned"),
        "samples of a search count as generated": replace("not sequence.request.is_search_step", "True"),
        "a bad score is reported": never("index in bad"),
        "one token fewer than max_tokens": off_by_one("sequence.max_len", -1),
        "a stop token at max_tokens counts as length": replace(
            "sequence.has_stopped", "len(sequence.tokens) < sequence.max_len and _0", role="test"
        ),
        "a suspect is compared with the decode batch of another worker": replace(
            "self._state.workers[sequence.epoch]", "next(iter(self._state.workers.values()))"
        ),
    },
    ResultApplier.apply: {"rows with drafts count as computed up to their start": without("row.num_drafts")},
    result_applier: {
        "every token of the step belongs to the first row with drafts": drop("first += count"),
        "a bad row is delivered": replace("_bad_rows(...)", "_0 - result.bad_rows"),
        "a token out of the vocabulary is delivered": always("0 <= min(tokens) <= max(tokens) < vocab_size"),
        "a negative token is delivered": replace("not 0 <= token < vocab_size", "token >= vocab_size"),
        "the token of a stuck row counts": replace("outside - result.stuck_rows", "outside"),
        "scores beside samples are taken for bad": replace(
            "(i for i, x in enumerate(_1, _2) if _)", "(i for i, x in enumerate(_1, _2))"
        ),
        "scores of an unfinished request end it": replace("row.sequence.has_scores_left", "False"),
        "reported scores are not noted": drop("sequence.num_scored = row.end"),
        "an old admission's scores are reported a second time": never("row.end <= first"),
    },
    ChunkRow: {"a request ends with the first row of its mean": always("_ == self.sequence.prompt_len")},
    InflightStep: {
        "a stuck row beyond the outputs is accepted": replace(
            "(*result.bad_rows, *result.stuck_rows, *result.deferred_rows)", "(*result.bad_rows, *result.deferred_rows)"
        ),
        "a deferred row beyond the outputs is accepted": replace(
            "(*result.bad_rows, *result.stuck_rows, *result.deferred_rows)", "(*result.bad_rows, *result.stuck_rows)"
        ),
        "a step of NaN seconds is accepted": replace(
            'not 0.0 <= result.step_seconds < float("inf")', "result.step_seconds < 0.0"
        ),
        "more tokens than drafts are accepted": never("not all(0 < count <= _ <= _ for count, num, most in _)"),
    },
    InflightStep.outputs: {
        "the result's rows are taken in another order": replace("self.chunk_rows", "self.chunk_rows[::-1]")
    },
    ResultTokens: {
        "a chunk gets the logprobs of the next row, too": replace(
            "self._result.logprobs[sample:_]", "self._result.logprobs[sample : sample + 2]"
        ),
        "logprobs are taken by count, not by row": replace(
            "self._result.logprobs[sample:_]", "self._result.logprobs[len(self._logprobs) : len(self._logprobs) + 1]"
        ),
        "a stop token in a decode step is missed": replace("map(...)", "()"),
        "logprobs of a skipped row stay": replace("skipped if logprobs else ()", "()"),
        "decode rows get the logprobs of the chunks, too": replace(
            "self._result.logprobs[:_]", "self._result.logprobs"
        ),
    },
    LiveRequests: {
        "requests are not counted": drop("self._state.adapters.acquire(sequence.request.adapter)"),
        "an expired request runs a step longer": boundary("self.deadlines[0][0] <= now"),
        "the deadline of a finished request wakes": never(
            "self.deadlines and self.deadlines[0][2].state is State.FINISHED"
        ),
        "an index is never free again": drop("state.adapters.release(sequence.request.adapter)"),
        "finished requests stay suspects": drop("state.poison.remove(sequence)"),
        "a request ends on another worker": replace(
            "state.workers[sequence.epoch]", "next(iter(state.workers.values()))"
        ),
    },
}
