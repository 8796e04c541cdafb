"""Bugs to plant in what concerns several workers. See `mutations` for operators and patterns."""

from __future__ import annotations

from simulation.mutations import Bug, always, boundary, drop, never, replace, swap, without

from lineclear.scheduler.core import placement
from lineclear.scheduler.core.isolation import Isolation
from lineclear.scheduler.core.live_requests import LiveRequests
from lineclear.scheduler.core.placement import Placement
from lineclear.scheduler.core.planner import StepPlanner
from lineclear.scheduler.core.poison_detector import PoisonDetector
from lineclear.scheduler.core.queue_walk import QueueWalk, _Cursor
from lineclear.scheduler.core.result_applier import ResultApplier
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.shared_state import SharedState
from lineclear.scheduler.core.token_budget import TokenBudget
from lineclear.scheduler.core.worker_state import WorkerState

_PLACEMENT = (
    Bug("a request stays with the worker that plans first", Placement.leaves, always("best is None")),
    Bug("a request goes to the slowest worker", Placement.leaves, replace("other_cost < cost", "other_cost > cost")),
    Bug(
        "a request waits for a better worker for ever",
        Placement.leaves,
        never("sequence.wait_until is not None and self._now >= sequence.wait_until"),
    ),
    Bug(
        "an overtaken request is left to another worker",
        Placement.leaves,
        without("sequence.overtaken_count >= self._state.limits.max_queue_overtakes"),
    ),
    Bug("a request waits for a worker without step times", Placement.leaves, without("not in_seconds")),
    Bug(
        "the queue of work is not compared",
        Placement.leaves,
        replace("other.queued_tokens + uncached", "uncached"),
    ),
    Bug(
        "cached prefixes are not compared",
        placement._uncached,
        replace("len(shared)", "0"),
    ),
    Bug("a request is left to a worker without room", Placement._choices, always("batch.has_room(...)")),
    Bug("a request is left to a worker that is too small", Placement._choices, without("sequence.max_len <= _")),
    Bug(
        "a request is left to a worker that takes none",
        Placement._find_others,
        without("self._state.takes_requests(worker)"),
    ),
    Bug(
        "a request is left to a worker whose batch is closed",
        Placement._choices,
        replace("other.joins_left > 0", "True"),
    ),
    Bug(
        "a request starts where it never fits",
        SharedState.may_take,
        without("sequence.max_len > worker.max_len"),
    ),
    Bug(
        "samples in flight elsewhere stop admission",
        SharedState.may_take,
        replace("sequence.in_flight == 0 or _", "True"),
    ),
    Bug("a left request does not wake the scheduler", Scheduler.next_deadline, replace("worker.next_turn()", "None")),
    Bug("the queue is passed in two parts", QueueWalk.next, replace("entry[0]", "-entry[0][1]")),
    Bug(
        "a started request waits for a worker that is busy",
        Placement.leaves,
        without("sequence.started_at is not None"),
    ),
    Bug(
        "a member of a group is left to another worker",
        Placement.__init__,
        without("not worker.strategy.fills_batches"),
    ),
    Bug(
        "the blocks that growing sequences need are not kept on another worker",
        Placement._choices,
        replace("batch.headroom + other.blocks_left", "-99"),
    ),
    Bug(
        "tokens of the plan are not counted as work",
        Placement.leaves,
        replace("self._worker.queued_tokens() + planned_tokens", "self._worker.queued_tokens()"),
    ),
    Bug(
        "a step in flight is not counted as work",
        WorkerState.queued_tokens,
        replace("sum(_ for step in self.inflight)", "0"),
    ),
    Bug("a sequence is passed twice in one plan", _Cursor.head, always("s.queue_key > self._last_key")),
    Bug("only the first of the queue is looked at", _Cursor.head, boundary("len(found) < self._count")),
)

_LOSS = (
    Bug(
        "a crash makes suspects on every worker",
        Scheduler.worker_lost,
        replace("worker.inflight", "[step for other in state.workers.values() for step in other.inflight]"),
    ),
    Bug(
        "a preempted request keeps its lost samples",
        WorkerState.leave,
        replace("(s for inflight in self.inflight for s in inflight.sampled())", "()"),
    ),
    Bug(
        "the next worker is stopping like the lost one",
        WorkerState._clear,
        replace("self.is_stopping = False", "self.is_stopping = getattr(self, 'is_stopping', False)"),
    ),
    Bug(
        "the last budget is the first to be used",
        Scheduler.worker_joined,
        replace("self._vacant.pop(0)", "self._vacant.pop()"),
    ),
    Bug(
        "a request ends on another worker",
        LiveRequests._free,
        replace("state.workers[sequence.epoch]", "next(iter(state.workers.values()))"),
    ),
    Bug(
        "a request keeps the epoch of its first worker",
        StepPlanner._start,
        replace("self._worker.epoch", "sequence.epoch or _0"),
    ),
    Bug(
        "a suspect is compared with the decode batch of another worker",
        ResultApplier._clear_suspects,
        replace("self._state.workers[sequence.epoch]", "next(iter(self._state.workers.values()))"),
    ),
    Bug(
        "only the first worker wakes the scheduler",
        Scheduler.next_deadline,
        replace("self._state.workers.items()", "list(self._state.workers.items())[:1]"),
    ),
    Bug(
        "only the prefix cache of the first worker is emptied",
        Scheduler.clear_prefix_cache,
        replace("self._state.workers.values()", "list(self._state.workers.values())[:1]"),
    ),
    Bug("void samples outlive their worker", WorkerState.leave, drop("sequence.num_void = 0")),
    Bug("positions of lost samples count as computed", WorkerState.leave, drop("sequence.max_computed_before = _")),
    Bug(
        "a worker that gets no plans wakes the scheduler",
        Scheduler.next_deadline,
        without("epochs is not None and epoch not in epochs"),
    ),
)

_ISOLATION = (
    Bug("a suspect starts beside others", SharedState.may_take, without("self.poison.must_isolate(sequence)")),
    Bug("healthy requests pause for a suspect", Isolation.is_due, always("len(_) == 1 or _")),
    Bug("every worker runs suspects", Scheduler.plan, without("epoch != state.isolation_epoch")),
    Bug("suspects run on the fullest worker", Isolation._worker_for, swap("min", "max")),
    Bug("the next suspect runs on another worker", Isolation._worker_for, replace("reserved or able", "able")),
    Bug(
        "a worker reserved for suspects takes requests",
        SharedState.takes_requests,
        without("worker.epoch != self.isolation_epoch"),
    ),
    Bug(
        "a suspect waits for a worker that is too small",
        Isolation._worker_for,
        replace("suspect.max_len <= w.max_len", "True"),
    ),
    Bug(
        "the only worker runs its other requests before the suspect",
        Isolation.is_due,
        without("len(state.workers) == 1"),
    ),
    Bug(
        "a reservation for suspects never ends",
        Isolation.choose,
        drop("state.isolation_epoch, state.is_isolating = None, False"),
    ),
    Bug(
        "the next reserved worker pauses its own requests",
        Isolation.choose,
        replace("state.is_isolating and worker.epoch == state.isolation_epoch", "state.is_isolating"),
    ),
    Bug("a suspect runs on a worker that stops", Isolation._worker_for, without("not state.is_leaving(w)")),
    Bug("a suspect keeps its slot", StepPlanner.run_isolated, drop("self._release_slots()")),
    Bug(
        "the youngest suspect goes first",
        PoisonDetector.isolated_by_age,
        replace("s.queue_key", "(-s.queue_key[0], -s.queue_key[1])"),
    ),
    Bug("a suspect preempts nobody", StepPlanner._preempt_for_blocks, drop("self._preempt(other)")),
)

_CAPACITY = (
    Bug("a request must fit the smallest worker", Scheduler._largest_worker, swap("max", "min")),
    Bug(
        "a request must fit the worker that joins",
        Scheduler.worker_joined,
        replace("limits.check_capacity(sequence.request, largest)", "limits.check_capacity(sequence.request, hello)"),
    ),
    Bug(
        "stopping workers take no request at all",
        SharedState.is_leaving,
        replace("worker.is_stopping and _", "worker.is_stopping"),
    ),
    Bug(
        "a group waits for requests that run elsewhere only",
        SharedState.batching_state,
        replace("self.may_take(worker, sequence)", "True"),
    ),
    Bug("a stopping worker takes requests", SharedState.takes_requests, without("not self.is_leaving(worker)")),
    Bug("a second halving has no effect", TokenBudget.halve, replace("self._halvings += 1", "self._halvings = 1")),
    Bug(
        "the budget stays halved after a request that never fits",
        Scheduler.on_step_error,
        drop("worker.budget.restore()"),
    ),
    Bug("the budget doubles after each step", TokenBudget.count_step, replace("self._steps_to_doubling == 0", "True")),
)

WORKER_BUGS = (*_PLACEMENT, *_LOSS, *_ISOLATION, *_CAPACITY)
