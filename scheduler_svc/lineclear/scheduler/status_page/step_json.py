"""Steps and states as JSON for the status page: columns of numbers, no content and no request ids."""

from __future__ import annotations

import base64
import json
from collections import OrderedDict
from typing import Any

from lineclear.scheduler.steps.scheduler_state import SchedulerState
from lineclear.scheduler.steps.step_history import ExecutedStep


class StepTexts:
    """Makes the JSON of each step once for all pages, and keeps the last `size`. For any number of threads."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._made: OrderedDict[int, str] = OrderedDict()

    def of(self, step: ExecutedStep) -> str:
        """Return the JSON of a step."""
        text = self._made.get(step.number)
        if text is None:
            text = self._made[step.number] = json.dumps(_step(step), separators=(",", ":"))
            while len(self._made) > self._size:
                self._made.popitem(last=False)
        return text


def _step(step: ExecutedStep) -> dict[str, Any]:
    found = step.record()
    rows = found.rows
    return {
        "number": found.number,
        "worker": found.worker,
        "step": found.step,
        "at": round(found.planned_at, 6),
        "seconds": found.step_seconds,
        "slot": rows.slot,
        "request": rows.request,
        "start": rows.start,
        "count": rows.num_tokens,
        "cached": rows.cached_tokens,
        "kind": "".join(kind.value[0] for kind in rows.kind),
        "samples": sum(rows.samples),
        "started": found.started,
        "ended": found.ended,
        "preempted": found.preempted,
        "slots": found.num_slots,
    }


def state_text(state: SchedulerState) -> str:
    """Return the JSON of a state."""
    core = state.core
    return json.dumps(
        {
            "at": round(state.taken_at, 6),
            "draining": core.draining,
            "num_waiting": core.num_waiting,
            "waiting": [
                [w.number, w.prompt_len, w.max_tokens, round(state.taken_at - w.arrival, 3)] for w in core.waiting
            ],
            "running": [
                [r.number, worker.index, r.slot, r.prompt_len, r.max_tokens, r.position, r.cached_tokens, r.preemptions]
                for worker in state.workers
                for r in worker.view.running
            ],
            "workers": [
                {
                    "worker": worker.index,
                    "device": worker.view.device,
                    "slots": worker.view.num_slots,
                    "running": len(worker.view.running),
                    "block_size": worker.view.block_size,
                    "blocks": len(worker.view.references),
                    "used": worker.blocks_used,
                    "shared": worker.blocks_shared,
                    "cached": len(worker.view.cached),
                    "map": base64.b64encode(worker.block_map).decode(),
                }
                for worker in state.workers
            ],
            "workers_wanted": state.num_workers_wanted,
            "generation_tokens": core.counters.generation_tokens,
            "queries": core.counters.prefix_cache_queries,
            "hits": core.counters.prefix_cache_hits,
            "preemptions": core.counters.preemptions,
        },
        separators=(",", ":"),
    )
