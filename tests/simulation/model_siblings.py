"""Model of the outputs of one request: their prompt is computed once."""

from __future__ import annotations

from simulation.invariant_error import require
from simulation.model_sequence import ModelSequence
from simulation.model_workers import ModelWorker


def check_sharing(sequence: ModelSequence, worker: ModelWorker) -> None:
    """Check a request that takes a slot beside a sibling whose prompt is planned: it computes at most a block of it.

    So n outputs that fit together compute at most the prompt and n blocks. Blocks that were evicted, cleared or proved
    to be bad since then may be missing. A request that reports scores of its prompt computes them.
    """
    num_dropped, sequence.num_dropped = worker.blocks.num_dropped, worker.blocks.num_dropped
    prompt_len = len(sequence.request.prompt)
    if not worker.limits.prefix_cache or sequence.num_cacheable < prompt_len - 1:
        return
    for other in sequence.siblings:
        is_beside = other is not sequence and other.is_running and other.epoch == worker.epoch
        if is_beside and other.num_planned >= prompt_len - 1 and other.num_dropped == num_dropped:
            is_short = prompt_len - sequence.num_planned <= worker.blocks.size
            require(is_short, "I27", "a sibling computes at most a block of the prompt")
