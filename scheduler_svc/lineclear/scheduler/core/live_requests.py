"""The requests that have not ended: by id, by deadline, and the ways they end."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from lineclear.errors import LineclearError
from lineclear.scheduler.core.events import Failed, Finished, FinishReason
from lineclear.scheduler.core.sequence import Sequence, State
from lineclear.scheduler.core.shared_state import SharedState


class LiveRequests:
    """The live requests of a core."""

    def __init__(self, state: SharedState) -> None:
        self._state = state
        self._by_id: dict[str, Sequence] = {}
        self._deadlines: list[tuple[float, int, Sequence]] = []  # a heap
        self._num_search_steps = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._by_id.values()))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    @property
    def num_deadlines(self) -> int:
        """Deadlines that are kept, those of some requests that have ended included."""
        return len(self._deadlines)

    def search_steps(self) -> list[Sequence]:
        """Return the requests that are steps of beam searches."""
        return [s for s in self._by_id.values() if s.request.is_search_step] if self._num_search_steps else []

    def get(self, request_id: str) -> Sequence | None:
        """Return the live request with this id."""
        return self._by_id.get(request_id)

    def add(self, sequence: Sequence) -> None:
        """Add an admitted request."""
        self._by_id[sequence.request.request_id] = sequence
        self._num_search_steps += sequence.request.is_search_step
        self._state.adapters.acquire(sequence.request.adapter)
        if sequence.request.deadline is not None:
            heapq.heappush(self._deadlines, (sequence.request.deadline, sequence.number, sequence))

    def pop_expired(self, now: float) -> Iterator[Sequence]:
        """Yield the requests whose deadline has passed. The caller ends each."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, sequence = heapq.heappop(self._deadlines)
            if sequence.state is not State.FINISHED:
                yield sequence

    def next_deadline(self) -> float | None:
        """Return the earliest deadline."""
        while self._deadlines and self._deadlines[0][2].state is State.FINISHED:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    # --- the end of a request ---------------------------------------------------------------------------------------

    def complete(
        self, sequence: Sequence, reason: FinishReason, matched: int | None, now: float, num_tokens: int | None = None
    ) -> Finished:
        """End a request whose answer is complete."""
        self._free(sequence)
        self._state.pace.observe(sequence)
        self._state.counters.requests_finished += 1
        return Finished(sequence.request.request_id, reason, matched, sequence.stats(now, num_tokens))

    def fail(self, sequence: Sequence, error: LineclearError, now: float, *, tainted: bool = False) -> Failed:
        """End a request with an error. The caller counts it. `tainted` blocks are zeroed before reuse."""
        self._free(sequence, tainted=tainted)
        return Failed(sequence.request.request_id, error, sequence.stats(now))

    def _free(self, sequence: Sequence, *, tainted: bool = False) -> None:
        """Any state -> FINISHED."""
        state = self._state
        state.poison.remove(sequence)
        state.queue_order.on_finish(sequence)
        if sequence.state is State.RUNNING:
            state.workers[sequence.epoch].batch.free(sequence, State.FINISHED, tainted=tainted)
        else:
            assert sequence.state is State.WAITING
            (state.fresh if sequence in state.fresh else state.resuming).remove(sequence)
            sequence.state = State.FINISHED
        del self._by_id[sequence.request.request_id]
        self._num_search_steps -= sequence.request.is_search_step
        state.adapters.release(sequence.request.adapter)
        if len(self._deadlines) > 2 * len(self._by_id) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[2].state is not State.FINISHED]
            heapq.heapify(self._deadlines)
