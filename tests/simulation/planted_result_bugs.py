"""Bugs to plant in results, the ends of requests and the blame for a crash. See `mutations` for operators."""

from __future__ import annotations

from simulation.mutations import Bug, always, boundary, drop, never, off_by_one, replace, without

from lineclear.scheduler.core import limits, running_batch
from lineclear.scheduler.core.decode_batch import DecodeBatch
from lineclear.scheduler.core.inflight_step import InflightStep, ResultTokens
from lineclear.scheduler.core.isolation import Isolation
from lineclear.scheduler.core.live_requests import LiveRequests
from lineclear.scheduler.core.planner import StepPlanner
from lineclear.scheduler.core.poison_detector import PoisonDetector
from lineclear.scheduler.core.result_applier import ResultApplier
from lineclear.scheduler.core.running_batch import RunningBatch
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import Sequence
from lineclear.scheduler.core.worker_state import WorkerState

_RESULTS = (
    Bug(
        "the epoch of a result is not compared",
        ResultApplier.apply,
        replace("self._state.workers.get(result.epoch)", "next(iter(self._state.workers.values()), None)"),
    ),
    Bug(
        "the step of a result is not compared",
        ResultApplier.apply,
        without("result.step != inflight.step"),
    ),
    Bug(
        "a step in flight is removed before its result is checked",
        ResultApplier.apply,
        replace("worker.inflight[0]", "worker.inflight.popleft()"),
    ),
    Bug(
        "a step of NaN seconds is accepted",
        InflightStep.check,
        replace('not 0.0 <= result.step_seconds < float("inf")', "result.step_seconds < 0.0"),
    ),
    Bug(
        "steps of a lost worker stay in flight",
        WorkerState._clear,
        replace("deque()", "getattr(self, 'inflight', deque())"),
    ),
    Bug(
        "a lost sample counts as known",
        WorkerState.leave,
        drop("sequence.num_known = len(sequence.tokens)"),
    ),
    Bug(
        "a recovered request keeps its planned positions",
        running_batch._reset_sequence,
        replace("sequence.num_planned = _1 = _2 = 0", "_1 = _2 = 0"),
    ),
    Bug(
        "rows of an earlier admission count for this one",
        ResultApplier.apply,
        without("sequence.admission_count == row.admission_count"),
    ),
    Bug(
        "a wasted sample is not counted",
        ResultApplier._append_tokens,
        drop("counters.wasted_samples += 1"),
        times=2,
    ),
    Bug(
        "the decode batch keeps its members when the worker is lost",
        Scheduler.worker_lost,
        drop("worker.batch.dissolve_decode()"),
    ),
)

_ENDS = (
    Bug("one position too many is planned", Sequence.num_unplanned, off_by_one("self.max_len - 1")),
    Bug("one decode step too many", DecodeBatch.finishing, replace("self._by_last_step.get(...)", "()")),
    Bug(
        "a sequence that left the decode batch counts as a member",
        DecodeBatch.leave,
        drop("sequence.in_decode_batch = False"),
    ),
    Bug("a sequence leaves the decode batch without sync", DecodeBatch.leave, drop("self.sync(sequence)")),
    Bug(
        "a sequence that rejoined counts as one that stayed",
        DecodeBatch.left_since,
        without("sequence.decode_joined_at > decode_step"),
    ),
    Bug("changed members are taken for the current rows", DecodeBatch.left_since, always("rows is self._cached_rows")),
    Bug(
        "a bad token is appended with the others",
        ResultApplier._append_decode_rows,
        drop("batch.leave_decode(rows[row])"),
    ),
    Bug("the cached rows outlive a member", DecodeBatch.leave, drop("self._cached_rows = None")),
    Bug("a joining sequence has no row", DecodeBatch._add, drop("self._cached_rows = None")),
    Bug("a stop token in a decode step is missed", ResultTokens.add_decode_rows, replace("map(...)", "()")),
    Bug(
        "the tokens of a decode step are one index late",
        DecodeBatch._add,
        off_by_one("offset + 1 - sequence.prompt_len"),
    ),
    Bug(
        "the keys and values of a decode step are not counted",
        DecodeBatch.num_positions,
        without("self._sum_of_offsets"),
    ),
    Bug("one token fewer than max_tokens", ResultApplier._finish_complete, off_by_one("sequence.max_len", -1)),
    Bug(
        "a stop token is missed at min_tokens + 1",
        Sequence.has_stopped,
        off_by_one("self.request.sampling.min_tokens"),
    ),
    Bug(
        "a stop token at max_tokens counts as length",
        ResultApplier._finish_complete,
        replace("sequence.has_stopped", "len(sequence.tokens) < sequence.max_len and _0"),
    ),
    Bug("the end is reported twice", Scheduler.cancel, replace("[self._live.fail(...)]", "2 * _0")),
    Bug(
        "the statistics leave out the cut of a stop string",
        Scheduler.finish_at_stop_string,
        replace("self._live.complete(_1, _2, _3, _4, num_tokens)", "self._live.complete(_1, _2, _3, _4)"),
    ),
    Bug("an expired request runs a step longer", LiveRequests.pop_expired, boundary("self._deadlines[0][0] <= now")),
)

_LOGPROBS = (
    Bug(
        "a chunk gets the logprobs of the next row, too",
        ResultTokens.add,
        replace("self._result.logprobs[sample:_]", "self._result.logprobs[sample : sample + 2]"),
    ),
    Bug(
        "logprobs are taken by count, not by row",
        ResultTokens.add,
        replace(
            "self._result.logprobs[sample:_]",
            "self._result.logprobs[len(self._logprobs) : len(self._logprobs) + 1]",
        ),
    ),
    Bug(
        "logprobs of a skipped row stay",
        ResultTokens.add_decode_rows,
        replace("skipped if logprobs else ()", "()"),
    ),
    Bug(
        "decode rows get the logprobs of the chunks, too",
        ResultTokens.add_decode_rows,
        replace("self._result.logprobs[:_]", "self._result.logprobs"),
    ),
)

_POISON = (
    Bug("no request is ever suspected", PoisonDetector.record_crash, drop("sequence.crash_count += 1")),
    Bug("suspects run together", Isolation.choose, replace("state.poison.isolated_by_age()", "()", role="iter")),
    Bug("a first crash is proof", PoisonDetector.is_poison, always("sequence.crash_count > 1")),
    Bug(
        "a crash beside others is proof",
        PoisonDetector.record_crash,
        replace("len(in_flight) != 1", "not in_flight"),
    ),
    Bug("an isolated crash proves nothing", PoisonDetector.is_poison, boundary("_ >= 1.0")),
    Bug("a kill counts as much as a crash", PoisonDetector.is_poison, always("loss is WorkerLoss.CRASHED")),
    Bug("suspicion never ends", PoisonDetector.clear_passed, never("s.num_computed >= s.clear_position")),
    Bug("suspicion ends with the first result", PoisonDetector.clear_passed, always("s.num_computed >= _")),
    Bug("a suspect runs beside the steps of another", Scheduler.plan, never("any(...)")),
    Bug(
        "a clean loss counts as a crash",
        Scheduler.worker_lost,
        replace("loss is not WorkerLoss.CLEAN", "worker.inflight"),
    ),
    Bug(
        "an out-of-memory step makes no suspects",
        Scheduler.on_step_error,
        drop("self._state.poison.record_crash([inflight])"),
    ),
    Bug("finished requests stay suspects", LiveRequests._free, drop("state.poison.remove(sequence)")),
)

_MODEL = (
    Bug(
        "an answer continues on another model",
        Scheduler.worker_joined,
        replace("started_on if _ else ''", "''"),
    ),
    Bug(
        "a request that has not started is bound to the old model",
        Scheduler.worker_joined,
        replace("started_on if _ else ''", "started_on"),
    ),
    Bug("a request for another model is admitted", limits.check_model, never("wanted != hello.model_fingerprint")),
    Bug(
        "the model of the last worker is forgotten",
        Scheduler.worker_joined,
        replace("(state.model_fingerprint, hello.model_fingerprint)", "('', hello.model_fingerprint)"),
    ),
)

_COUNTERS = (
    Bug("recomputed tokens are not counted", StepPlanner._add, drop("sequence.recomputed_tokens += again")),
    Bug("cached tokens are not counted", StepPlanner._start, drop("state.counters.prefix_cache_hits += start")),
    Bug("positions of last rows are not held", RunningBatch.num_held_positions, replace("self.finishing", "()")),
    Bug("tokens of steps are not totalled", Scheduler.plan, drop("state.counters.step_tokens += inflight.num_tokens")),
)

RESULT_BUGS = (*_RESULTS, *_ENDS, *_LOGPROBS, *_POISON, *_MODEL, *_COUNTERS)
