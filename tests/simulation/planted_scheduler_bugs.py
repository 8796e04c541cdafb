"""Bugs to plant in the scheduler's calls, and in what its workers share. See `mutations`."""

from __future__ import annotations

from simulation.mutations import Bugs, always, boundary, drop, never, replace, swap, without

from lineclear.scheduler.core.adapter_table import AdapterTable
from lineclear.scheduler.core.core_state import SharedState, WorkerState
from lineclear.scheduler.core.scheduler import Scheduler

SCHEDULER_BUGS: Bugs = {
    Scheduler: {
        "a request uses an adapter that is not loaded": drop("state.adapters.check(request.adapter)"),
        "the id of a live request is accepted again": never("request.request_id in self._live.by_id"),
        "deadlines that would pass in the queue are admitted": never(
            "self.limits.reject_unmeetable_deadlines and _ and _"
        ),
        "every request gets a place": never("not request.wants_position"),
        "a sibling is refused for its deadline": replace(
            "_1 and request.deadline is not None and not request.is_sibling", "_1 and request.deadline is not None"
        ),
        "a step of a search is refused while the server drains": replace(
            "state.draining and not request.is_sibling", "state.draining"
        ),
        "a step of a search loses its place in the queue": replace(
            "arrival if request.queued_since is None else request.queued_since", "arrival"
        ),
        "a request that completes a batch is not counted": replace(
            "queue_position(_1, _2, _3, arriving=1)", "queue_position(_1, _2, _3)"
        ),
        "the statistics leave out the cut of a stop string": replace(
            "self._live.complete(_1, _2, _3, _4, num_tokens)", "self._live.complete(_1, _2, _3, _4)"
        ),
        "a past wakeup spins": without("wakeup > worker.planned_at"),
        "a left request does not wake the scheduler": replace("worker.next_turn()", "None"),
        "only the first worker wakes the scheduler": replace(
            "self._state.workers.items()", "list(self._state.workers.items())[:1]"
        ),
        "a worker that gets no plans wakes the scheduler": without("epochs is not None and epoch not in epochs"),
        "a switch keeps the queue order": never("limits.order != before.order"),
        "a switch reaches only the joined workers": replace(
            "(*state.workers.values(), *self._vacant)", "state.workers.values()"
        ),
        "a switch keeps the queue limits": replace("self.limits = state.limits = limits", "state.limits = limits"),
        "waiting requests keep their place after a switch": drop("state.fresh.sort()"),
        "preempted requests keep their place after a switch": drop("state.resuming.sort()"),
        "a switch forgets when requests arrived": replace("sequence.arrival", "0.0"),
        "a switch takes started requests for waiting ones": drop("state.queue_order.on_start(sequence)"),
        "a switch puts waiting requests before started ones": replace(
            "s.started_at is None", "s.started_at is not None"
        ),
        "an answer continues on another model": replace("started_on if _ else ''", "''"),
        "a request that has not started is bound to the old model": replace("started_on if _ else ''", "started_on"),
        "the model of the last worker is forgotten": replace(
            "(state.model_fingerprint, hello.model_fingerprint)", "('', hello.model_fingerprint)"
        ),
        "the last budget is the first to be used": replace("self._vacant.pop(0)", "self._vacant.pop()"),
        "a request must fit the worker that joins": replace(
            "limits.check_capacity(sequence.request, largest)", "limits.check_capacity(sequence.request, hello)"
        ),
        "a request must fit the smallest worker": swap("max", "min"),
        "a clean loss counts as a crash": replace("loss is not WorkerLoss.CLEAN", "worker.inflight"),
        "an out-of-memory step makes no suspects": drop("self._state.poison.record_crash([inflight])"),
        "the budget stays halved after a request that never fits": drop("worker.budget.restore()"),
        "a copied block is zeroed": never("copies and zero_blocks"),
        "a suspect runs beside the steps of another": never("any(...)"),
        "tokens of steps are not totalled": drop("state.counters.step_tokens += inflight.num_tokens"),
        "every worker runs suspects": without("epoch != state.isolation_epoch"),
    },
    Scheduler.submit: {"a draining server admits": never("state.draining")},
    Scheduler.cancel: {"the end is reported twice": replace("[self._live.fail(...)]", "2 * _0")},
    Scheduler.next_deadline: {"a full pipeline spins": never("worker.is_full")},
    Scheduler.worker_lost: {
        "the decode batch keeps its members when the worker is lost": drop("worker.batch.dissolve_decode()"),
        "a crash makes suspects on every worker": replace(
            "worker.inflight", "[step for other in state.workers.values() for step in other.inflight]"
        ),
    },
    Scheduler.clear_prefix_cache: {
        "only the prefix cache of the first worker is emptied": replace(
            "self._state.workers.values()", "list(self._state.workers.values())[:1]"
        )
    },
    SharedState: {
        "a worker reserved for suspects takes requests": replace("worker.epoch != self.isolation_epoch", "True"),
        "a request starts where it never fits": without("sequence.max_len > worker.max_len"),
        "samples in flight elsewhere stop admission": replace("sequence.in_flight == 0 or _", "True"),
        "a suspect starts beside others": without("sequence.must_isolate"),
        "draining workers wait for full batches": replace("self.draining", "False"),
        "a group waits for requests that run elsewhere only": replace("self.may_take(worker, sequence)", "True"),
        "a batch counts requests that fit into other workers only": always("self.fresh.longest <= worker.max_len"),
        "no sequence is ever protected": drop("victim.protected = _"),
    },
    WorkerState: {
        "steps of a lost worker stay in flight": replace("deque()", "getattr(self, 'inflight', deque())"),
        "a switch keeps the number of slots": drop("self.batch.num_slots = _"),
        "a switch fills slots beyond the worker's": replace(
            "min(limits.max_batch_size, self.batch.max_slots)", "limits.max_batch_size"
        ),
        "a lost sample counts as known": drop("sequence.num_known = len(sequence.tokens)"),
        "a preempted request keeps its lost samples": replace(
            "(s for inflight in self.inflight for s in inflight.sampled())", "()"
        ),
        "void samples outlive their worker": drop("sequence.num_void = 0"),
        "positions of lost samples count as computed": drop("sequence.max_computed_before = _"),
        "a plan beyond the pipeline depth": boundary("len(self.inflight) >= self._limits.pipeline_depth"),
        "a step in flight is not counted as work": replace("sum(_ for step in self.inflight)", "0"),
    },
    WorkerState.follow: {
        "a switch keeps the batching strategy": drop("self.strategy = _"),
        "a switch keeps the token budget": drop("self._limits = limits"),
    },
    WorkerState.leave: {
        "a worker change restores the token budget": replace("self._clear()", "(self._clear(), self.budget.restore())")
    },
    AdapterTable: {
        "one adapter more than the limit is loaded": replace("self._max_adapters + 1", "self._max_adapters + 2"),
        "the index of an adapter in use is given to another": never("num_uses", role="test"),
        "an unloaded adapter that is in use takes requests": drop("self._unloading.add(key)"),
    },
    AdapterTable.load: {
        "an adapter that is loaded again still goes": drop("self._unloading.discard(key)"),
        "an adapter that is loaded again gets another index": replace("key not in self._indices", "True"),
    },
}
