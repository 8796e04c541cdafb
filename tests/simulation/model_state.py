"""Model of the scheduler's state: waiting and running requests, steps in flight, and the joined worker.

It follows the calls and events of the core and never reads the core's state. `oracle` and `plan_checks` check it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from simulation.invariant_error import require
from simulation.model_blocks import ModelBlocks
from simulation.model_queue import ModelQueue
from simulation.model_sequence import ModelSequence

from lineclear.errors import KvCapacityExceeded, LineclearError, ModelChanged, PromptTooLong
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.core.stats import Counters
from lineclear.wire.messages import Hello


class ModelStep:
    """A plan that waits for its result."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.rows: list[tuple[ModelSequence, int, int]] = []  # sequence, its admission_count, end position
        self.samples: list[ModelSequence] = []


class ModelState:
    """Live requests by state, and the worker that they run on."""

    def __init__(self, limits: CoreLimits) -> None:
        self.limits = limits
        self.live: dict[str, ModelSequence] = {}
        self.by_seed: dict[int, ModelSequence] = {}
        self.fresh: dict[ModelSequence, None] = {}  # have not started
        self.resuming: dict[ModelSequence, None] = {}
        self.running: dict[int, ModelSequence] = {}  # by slot
        self.finishing: dict[ModelSequence, None] = {}  # last row in flight: without slot, with blocks
        self.inflight: deque[ModelStep] = deque()
        self.hello: Hello | None = None
        self.step = 0
        self.num_slots = 0
        self.blocks = ModelBlocks(limits.prefix_cache)
        self.queue = ModelQueue(limits)
        self.counters = Counters()
        self.draining = False

    def add(self, sequence: ModelSequence) -> None:
        """Queue an admitted request."""
        self.live[sequence.request.request_id] = self.by_seed[sequence.request.sampling.seed] = sequence
        self.fresh[sequence] = None
        self.queue.push(sequence)

    def remove(self, sequence: ModelSequence) -> None:
        """End a request."""
        require(sequence.is_live, "I10", "a request ends once")
        sequence.is_live = False
        del self.live[sequence.request.request_id], self.by_seed[sequence.request.sampling.seed]
        if sequence.is_running:
            self.stop_running(sequence, sequence.num_computed)
        self.fresh.pop(sequence, None)
        self.resuming.pop(sequence, None)
        self.queue.on_finish(sequence, self.fresh, is_idle=not self.live)

    def stop_running(self, sequence: ModelSequence, computed: int) -> None:
        """Release slot and blocks of a sequence; positions below `computed` count as computed before."""
        self.blocks.release(sequence)
        if sequence in self.finishing:
            del self.finishing[sequence]
        else:
            del self.running[sequence.slot]
        sequence.max_computed_before = max(sequence.max_computed_before, computed)
        sequence.is_running, sequence.slot = False, -1
        sequence.num_planned = sequence.num_computed = sequence.num_shared = sequence.num_offered = 0

    def preempt(self, victim: ModelSequence) -> None:
        """Have a running request wait again."""
        self.stop_running(victim, victim.num_planned)
        victim.preemptions += 1
        victim.protected = victim.preemptions >= self.limits.max_preemptions
        self.resuming[victim] = None
        self.counters.preemptions += 1

    def release_slots(self) -> None:
        """Free the slots of the sequences whose last row is planned."""
        for slot, sequence in list(self.running.items()):
            if sequence.num_known == sequence.max_len:
                del self.running[slot]
                sequence.slot = -1
                self.finishing[sequence] = None

    def change_worker(self, hello: Hello | None) -> None:
        """Join another worker, or none: running requests wait again, and no step is in flight."""
        for sequence in sorted((*self.running.values(), *self.finishing), key=lambda s: s.queue_key):
            sequence.recoveries += 1
            self.stop_running(sequence, sequence.num_computed)
            self.resuming[sequence] = None
        for sequence in self.live.values():
            sequence.in_flight = sequence.num_void = 0
            sequence.max_computed_before = min(sequence.max_computed_before, len(sequence.tokens))
        self.inflight.clear()
        self.hello = hello
        self.step = self.num_slots = 0
        self.blocks.reset(0, 1)
        if hello is not None:
            self.num_slots = min(hello.num_slots, self.limits.max_batch_size)
            self.blocks.reset(hello.num_blocks, hello.block_size)

    def rejection(self, request: Request, started_on: str = "") -> type[LineclearError] | None:
        """Return the error if the joined worker can never run `request`; `started_on` is its first model, if any."""
        if self.hello is None:
            return None
        if (request.model_fingerprint or started_on) not in ("", self.hello.model_fingerprint):
            return ModelChanged
        total = len(request.prompt) + request.max_tokens
        if total > self.hello.max_model_len:
            return PromptTooLong
        # The last token is sampled but never computed.
        return KvCapacityExceeded if total - 1 > self.hello.num_blocks * self.hello.block_size else None

    def record_crash(self, steps: Iterable[ModelStep]) -> ModelSequence | None:
        """Count a crash for every sequence with a row in `steps`; return the sequence if it ran alone."""
        sequences = list({sequence: None for step in steps for sequence, _, _ in step.rows})
        for s in sequences:
            if s.is_live:
                s.crash_count += 1
                reached = s.num_planned or s.num_known - 1
                s.clear_position = min(max(s.clear_position, reached + 2), s.max_len - 1)
        return sequences[0] if len(sequences) == 1 and sequences[0].is_live else None

    def next_isolated(self) -> ModelSequence | None:
        """Return the oldest sequence that must run alone."""
        return min((s for s in self.live.values() if s.crash_count >= 2), key=lambda s: s.queue_key, default=None)
