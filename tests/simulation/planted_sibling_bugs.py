"""Bugs of requests with several outputs and of beam searches."""

from __future__ import annotations

from simulation.mutations import Bug, drop, never, replace

from lineclear.scheduler.core import limits
from lineclear.scheduler.core.planner import StepPlanner
from lineclear.scheduler.core.policies import Fifo
from lineclear.scheduler.core.request_queue import RequestQueue
from lineclear.scheduler.core.result_applier import ResultApplier
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.requests.answer.answer import Answer
from lineclear.scheduler.requests.answer.beams import Beams

SIBLING_BUGS = (
    Bug("a sibling needs a place in the queue", limits.check_queue, never("request.is_sibling", role="test")),
    Bug(
        "siblings count as waiting requests",
        limits.check_queue,
        replace("waiting.num_places", "len(waiting)"),
        times=4,
    ),
    Bug(
        "tokens of siblings count as waiting",
        limits.check_queue,
        replace("waiting.place_tokens", "waiting.num_tokens"),
        times=3,
    ),
    Bug("a sibling is not counted", RequestQueue.push, never("sequence.request.is_sibling", role="test")),
    Bug(
        "a sibling that leaves the queue stays counted",
        RequestQueue.remove,
        never("sequence.request.is_sibling", role="test"),
    ),
    Bug(
        "a token of a waiting sibling is not counted",
        RequestQueue.grow,
        drop("self.sibling_tokens += sequence.request.is_sibling"),
    ),
    Bug(
        "a sibling is refused for its deadline",
        Scheduler.submit,
        replace(
            "_1 and request.deadline is not None and not request.is_sibling", "_1 and request.deadline is not None"
        ),
    ),
    Bug(
        "a step of a search is refused while the server drains",
        Scheduler.submit,
        replace("state.draining and not request.is_sibling", "state.draining"),
    ),
    Bug(
        "a step of a search loses its place in the queue",
        Scheduler._key,
        replace("arrival if request.queued_since is None else request.queued_since", "arrival"),
    ),
    Bug("the first to arrive has no earlier key", Fifo.key, replace("return now", "return 0.0")),
    Bug(
        "a beam continues on another model",
        Beams._submit_step,
        replace("self._template.model_fingerprint or _1", "self._template.model_fingerprint"),
    ),
    Bug(
        "each step of a search needs a place in the queue",
        Beams._submit_step,
        replace("not is_first", "False"),
    ),
    Bug("siblings count the prompt again", StepPlanner._start, replace("not sequence.request.shares_prompt", "True")),
    Bug(
        "the prompts of later parts of a call do not count",
        StepPlanner._start,
        replace("sequence.request.shares_prompt", "sequence.request.is_sibling"),
    ),
    Bug(
        "samples of a search count as generated",
        ResultApplier._append_one,
        replace("not sequence.request.is_search_step", "True"),
    ),
    Bug("a search goes on after one of its requests failed", Answer.cancel, drop("stream.cancel(error)")),
)
