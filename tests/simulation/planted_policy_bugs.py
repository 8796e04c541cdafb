"""Bugs to plant in batching strategies and their switching. See `mutations` for operators and patterns."""

from __future__ import annotations

from simulation.mutations import Bug, always, boundary, drop, never, replace, without

from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.live_requests import LiveRequests
from lineclear.scheduler.core.policies import Adaptive, BatchingState, Continuous, DynamicTimeout, FixedSize
from lineclear.scheduler.core.running_batch import RunningBatch
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.shared_state import SharedState
from lineclear.scheduler.core.worker_state import WorkerState

_STRATEGIES = (
    Bug("a fixed batch takes late requests", FixedSize.max_joins, without("state.num_active == 0")),
    Bug(
        "a fixed batch forgets its waiting members",
        FixedSize.max_joins,
        never("self._joins_left and _"),
    ),
    Bug(
        "a fixed batch starts one short",
        FixedSize.max_joins,
        replace("_1 >= state.num_slots", "_1 >= state.num_slots - 1"),
    ),
    Bug("a fixed batch waits though the queue rejects", FixedSize.max_joins, without("state.refusing")),
    Bug("a group does not wait", DynamicTimeout._is_open, always("full or _ or _")),
    Bug(
        "a group waits for twice the timeout",
        DynamicTimeout._is_open,
        replace("self._settings.batch_timeout_seconds", "2 * _0"),
    ),
    Bug(
        "an idle engine does not wait for min_batch_size",
        Continuous._is_open,
        always("state.num_waiting >= min(...)"),
    ),
    Bug(
        "waiting ends a rounding error late",
        BatchingState.has_waited,
        replace("self.now >= self.oldest_arrival + seconds", "self.now - self.oldest_arrival >= seconds"),
    ),
    Bug("adaptive batching lets no request start", Adaptive.max_joins, replace("0 if state.num_active else 1", "0")),
    Bug(
        "a batch timeout is missed",
        Continuous.next_wakeup,
        replace("state.oldest_arrival + self._settings.batch_timeout_seconds", "None"),
    ),
    Bug(
        "a full pipeline spins",
        Scheduler.next_deadline,
        never("worker.is_full"),
    ),
    Bug("a past wakeup spins", Scheduler.next_deadline, without("wakeup > worker.planned_at")),
    Bug(
        "the deadline of a finished request wakes",
        LiveRequests.next_deadline,
        never("self._deadlines and self._deadlines[0][2].state is State.FINISHED"),
    ),
    Bug(
        "a plan beyond the pipeline depth",
        WorkerState.is_full,
        boundary("len(self.inflight) >= self._limits.pipeline_depth"),
    ),
    Bug(
        "a worker change restores the token budget",
        WorkerState.leave,
        replace("self._clear()", "(self._clear(), self.budget.restore())"),
    ),
    Bug(
        "a minimum batch of two counts as none",
        DynamicTimeout._is_open,
        replace("self._settings.min_batch_size > 1", "self._settings.min_batch_size > 2"),
    ),
    Bug(
        "a batch counts requests that fit into other workers only",
        SharedState._num_waiting,
        always("self.fresh.longest <= worker.max_len"),
    ),
    Bug("draining workers wait for full batches", SharedState.batching_state, replace("self.draining", "False")),
)

_SWITCHING = (
    Bug("waiting requests keep their place after a switch", Scheduler._assign_keys, drop("state.fresh.sort()")),
    Bug("preempted requests keep their place after a switch", Scheduler._assign_keys, drop("state.resuming.sort()")),
    Bug(
        "a switch forgets when requests arrived",
        Scheduler._assign_keys,
        replace("sequence.arrival", "0.0"),
    ),
    Bug(
        "a switch takes started requests for waiting ones",
        Scheduler._assign_keys,
        drop("state.queue_order.on_start(sequence)"),
    ),
    Bug(
        "a switch puts waiting requests before started ones",
        Scheduler._assign_keys,
        replace("s.started_at is None", "s.started_at is not None"),
    ),
    Bug("a switch keeps the queue order", Scheduler.switch, never("limits.order != before.order")),
    Bug("a switch keeps the tenants' weights", CoreLimits.order, replace("self.policy.share_weights", "None")),
    Bug("a switch keeps the preemption policy", Scheduler.switch, drop("state.preemption_policy = _")),
    Bug(
        "a switch reaches only the joined workers",
        Scheduler.switch,
        replace("(*state.workers.values(), *self._vacant)", "state.workers.values()"),
    ),
    Bug("a switch keeps the batching strategy", WorkerState.follow, drop("self.strategy = _")),
    Bug("a switch keeps the number of slots", WorkerState.follow, drop("self.batch.num_slots = _")),
    Bug("a switch keeps the token budget", WorkerState.follow, drop("self._limits = limits")),
    Bug(
        "fewer slots are not kept to",
        RunningBatch.num_free_slots,
        replace("max(0, _)", "len(self.unused_slots)"),
    ),
    Bug(
        "a switch keeps the queue limits",
        Scheduler.switch,
        replace("self.limits = state.limits = limits", "state.limits = limits"),
    ),
    Bug(
        "a switch fills slots beyond the worker's",
        WorkerState.follow,
        replace("min(limits.max_batch_size, self._hello.num_slots)", "limits.max_batch_size"),
    ),
)

POLICY_BUGS = (*_STRATEGIES, *_SWITCHING)
