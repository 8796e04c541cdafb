"""Bugs to plant in results and the ends of requests. See `mutations`."""

from __future__ import annotations

from simulation.mutations import Bugs, always, boundary, drop, never, off_by_one, replace, without

from lineclear.scheduler.core import result_applier
from lineclear.scheduler.core.inflight_step import ChunkRow, InflightStep, ResultTokens
from lineclear.scheduler.core.live_requests import LiveRequests
from lineclear.scheduler.core.result_applier import ResultApplier

RESULT_BUGS: Bugs = {
    ResultApplier.apply: {
        "scores are measured as plain tokens": replace("inflight.num_scored", "0"),
        "a stuck row has a token": replace("bad | result.stuck_rows", "bad"),
        "a deferred position counts as computed": replace(
            "row.num_drafts or sequence.num_void or row.end > sequence.num_planned", "row.num_drafts"
        ),
        "rows with drafts count as computed up to their start": without("row.num_drafts"),
        "the epoch of a result is not compared": replace(
            "self._state.workers.get(result.epoch)", "next(iter(self._state.workers.values()), None)"
        ),
        "the step of a result is not compared": without("result.step != inflight.step"),
        "a step in flight is removed before its result is checked": replace(
            "worker.inflight[0]", "worker.inflight.popleft()"
        ),
        "rows of an earlier admission count for this one": without("sequence.admission_count == row.admission_count"),
    },
    ResultApplier._restart_readers: {
        "sequences that share a block of a bad row go on": replace("worker.batch.add_readers(bad)", "()"),
        "void samples are delivered": drop("sequence.num_void = sequence.in_flight"),
        "positions with void samples count as computed": drop("sequence.max_computed_before = _"),
        "void scores are reported": drop("sequence.void_admission = _"),
    },
    ResultApplier._append_tokens: {
        "a void sample stays known": drop("sequence.num_known -= 1"),
        "a stuck decode stays in the decode batch": replace(
            "failed | result.deferred_rows if result.deferred_rows else failed", "result.bad_rows"
        ),
        "a deferred row has a token": never("row in result.deferred_rows"),
        "a deferred decode stays in the decode batch": replace(
            "failed | result.deferred_rows if result.deferred_rows else failed", "failed"
        ),
        "a wasted sample is not counted": drop("counters.wasted_samples += 1", times=2),
    },
    ResultApplier._append_decode_rows: {
        "a bad token is appended with the others": drop("batch.leave_decode(rows[row])")
    },
    ResultApplier._defer: {
        "rows behind a deferred one count": replace("sequence.in_flight", "0"),
        "a deferred position is not planned again": drop("sequence.num_planned = sequence.num_computed = _"),
        "positions behind a deferred one count as computed before": drop("sequence.max_computed_before = _"),
    },
    ResultApplier._fail: {
        "a stuck row fails with another error": never("row in result.stuck_rows"),
        "a stuck row taints its blocks": replace(
            "_1.fail(sequence, _stuck_row(), now)", "_1.fail(sequence, _stuck_row(), now, tainted=True)"
        ),
    },
    ResultApplier._append_row: {
        "tokens behind the end of an answer count": never("sequence.has_stopped"),
        "drafts behind the end of an answer count as accepted": replace("sample - samples.start", "len(samples) - 1"),
        "accepted drafts are not known": drop("sequence.num_known += num_accepted"),
        "accepted drafts are computed again": replace("sequence.num_known - 1", "sequence.num_planned"),
    },
    ResultApplier._append_one: {
        "samples of a search count as generated": replace("not sequence.request.is_search_step", "True")
    },
    ResultApplier._report: {"a bad score is reported": never("index in bad")},
    ResultApplier._finish_complete: {
        "one token fewer than max_tokens": off_by_one("sequence.max_len", -1),
        "a stop token at max_tokens counts as length": replace(
            "sequence.has_stopped", "len(sequence.tokens) < sequence.max_len and _0"
        ),
    },
    ResultApplier._clear_suspects: {
        "a suspect is compared with the decode batch of another worker": replace(
            "self._state.workers[sequence.epoch]", "next(iter(self._state.workers.values()))"
        )
    },
    result_applier._sampling_chunks: {
        "every token of the step belongs to the first row with drafts": drop("first += count")
    },
    result_applier._bad_rows: {
        "a bad row is delivered": replace("result.bad_rows", "frozenset()", times=2),
        "a token out of the vocabulary is delivered": always("0 <= min(tokens) <= max(tokens) < vocab_size"),
        "a negative token is delivered": replace("not 0 <= token < vocab_size", "token >= vocab_size"),
        "the token of a stuck row counts": replace("outside - result.stuck_rows", "outside"),
        "scores beside samples are taken for bad": replace("x.output is _SAMPLE", "True"),
    },
    result_applier._is_complete: {
        "scores of an unfinished request end it": replace("row.sequence.has_scores_left", "False")
    },
    result_applier._scored: {
        "reported scores are not noted": drop("sequence.num_scored = row.end"),
        "an old admission's scores are reported a second time": never("row.end <= first"),
    },
    ChunkRow.has_vector: {"a request ends with the first row of its mean": always("_ == self.sequence.prompt_len")},
    InflightStep.outputs: {
        "the result's rows are taken in another order": replace("self.chunk_rows", "self.chunk_rows[::-1]")
    },
    InflightStep.check: {
        "a stuck row beyond the outputs is accepted": replace(
            "(*result.bad_rows, *result.stuck_rows, *result.deferred_rows)", "(*result.bad_rows, *result.deferred_rows)"
        ),
        "a deferred row beyond the outputs is accepted": replace(
            "(*result.bad_rows, *result.stuck_rows, *result.deferred_rows)", "(*result.bad_rows, *result.stuck_rows)"
        ),
        "a step of NaN seconds is accepted": replace(
            'not 0.0 <= result.step_seconds < float("inf")', "result.step_seconds < 0.0"
        ),
    },
    InflightStep._check_counts: {"more tokens than drafts are accepted": never("not all(_)")},
    ResultTokens.add: {
        "a chunk gets the logprobs of the next row, too": replace(
            "self._result.logprobs[sample:_]", "self._result.logprobs[sample : sample + 2]"
        ),
        "logprobs are taken by count, not by row": replace(
            "self._result.logprobs[sample:_]", "self._result.logprobs[len(self._logprobs) : len(self._logprobs) + 1]"
        ),
    },
    ResultTokens.add_decode_rows: {
        "a stop token in a decode step is missed": replace("map(...)", "()"),
        "logprobs of a skipped row stay": replace("skipped if logprobs else ()", "()"),
        "decode rows get the logprobs of the chunks, too": replace(
            "self._result.logprobs[:_]", "self._result.logprobs"
        ),
    },
    LiveRequests.add: {"requests are not counted": drop("self._state.adapters.acquire(sequence.request.adapter)")},
    LiveRequests.pop_expired: {"an expired request runs a step longer": boundary("self._deadlines[0][0] <= now")},
    LiveRequests.next_deadline: {
        "the deadline of a finished request wakes": never(
            "self._deadlines and self._deadlines[0][2].state is State.FINISHED"
        )
    },
    LiveRequests._free: {
        "an index is never free again": drop("state.adapters.release(sequence.request.adapter)"),
        "finished requests stay suspects": drop("state.poison.remove(sequence)"),
        "a request ends on another worker": replace(
            "state.workers[sequence.epoch]", "next(iter(state.workers.values()))"
        ),
    },
}
