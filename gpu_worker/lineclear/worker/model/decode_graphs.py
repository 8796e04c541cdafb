"""CUDA graphs of decode steps: the model's forward pass and the argmax as one launch.

A graph replays the kernels of one step on the same addresses, so it holds for one number of rows: a batch size from a
list, to which steps are padded with rows that write to a block of their own. It also holds for one number of splits of
the longest context (see attention/triton_paged.py), rounded up to a power of two. Graphs are captured when a step needs
them first. They wrap any forward pass; one that waits for the device cannot be captured, and then all steps run
eagerly.

With tensor parallelism the collectives of NCCL are in the graph. All ranks see the same plans and put the same arrays
in the same places, so they capture and replay the same graphs in the same order. Whether a capture counts, they decide
together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import structlog
import torch
from torch import Tensor

from lineclear.worker.device.memory_budget import is_out_of_memory
from lineclear.worker.sampling.logits import Logits
from lineclear.worker.tensor_parallel.shard import Agree

log = structlog.get_logger(__name__)

Run = Callable[[], Logits]
Keep = Callable[[], Callable[[], None]]
Capture = Callable[[Run], tuple[Logits, Callable[[], object]]]
"""Captures a function; returns its outputs, whose memory stays, and the call that computes them again."""


class _Graph(NamedTuple):
    addresses: tuple[int, ...]
    """Of the inputs that it reads."""
    logits: Logits
    replay: Callable[[], object]


class DecodeGraphs:
    def __init__(self, batch_sizes: Sequence[int], capture: Capture, agree: Agree = bool) -> None:
        """`batch_sizes`: numbers of rows to capture graphs for; empty: none."""
        self._batch_sizes = sorted(set(batch_sizes))
        self._capture, self._agree = capture, agree
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._values: Tensor | None = None  # where all graphs leave their logits
        self.num_replays = 0

    @property
    def max_batch_size(self) -> int:
        """The most rows of a captured step; 0: none is captured."""
        return max(self._batch_sizes, default=0)

    def padded(self, num_rows: int) -> int:
        """Return the number of rows that a decode step is padded to; 0: it runs eagerly."""
        place = bisect_left(self._batch_sizes, num_rows)
        return self._batch_sizes[place] if place < len(self._batch_sizes) else 0

    def logits(
        self, num_rows: int, num_splits: int | None, inputs: Sequence[Tensor], run: Run, keep: Keep | None = None
    ) -> Logits:
        """Return the logits of the first `num_rows` rows of a padded step, valid until the next call.

        `inputs`: all tensors that change between steps, the first with one entry for each row. `run()` computes the
        step; it does so each time if `num_splits` is None, if it cannot be captured, or if the tensors have moved.
        `keep()`: if a step that runs twice differs from one that runs once, returns what undoes the runs of a capture.
        """
        graph = None if num_splits is None else self._graph(num_splits, inputs, run, keep)
        if graph is None:
            padded = run()
        else:
            graph.replay()
            self.num_replays += 1
            padded = graph.logits
        values, max_values, max_ids = (tensor[:num_rows] for tensor in padded[:3])
        return Logits(values, max_values, max_ids, bad=None if padded.bad is None else padded.bad[:num_rows])

    def _graph(self, num_splits: int, inputs: Sequence[Tensor], run: Run, keep: Keep | None) -> _Graph | None:
        key, addresses = (len(inputs[0]), num_splits), tuple(tensor.data_ptr() for tensor in inputs)
        graph = self._graphs.get(key)
        if graph is None:
            restore = keep() if keep else None
            graph = self._captured(key, addresses, run)
            if restore:
                restore()
            return graph
        return graph if graph.addresses == addresses else None

    def _captured(self, key: tuple[int, int], addresses: tuple[int, ...], run: Run) -> _Graph | None:
        problem, graph = "", None
        try:
            graph = _Graph(addresses, *self._capture(lambda: self._in_shared_memory(run())))
        except RuntimeError as error:  # an operation that cannot be captured
            if is_out_of_memory(error):  # ends a worker of several ranks, and so their wait for this one
                raise
            problem = (str(error).splitlines() or [type(error).__name__])[0][:200]
        if not self._agree(graph is not None) or graph is None:
            log.warning(
                "cuda_graphs_not_used",
                problem=problem or "another rank cannot capture it",
                hint="the model waits for the device in its forward pass; each step launches its kernels one by one",
            )
            self._batch_sizes = []
            return None
        self._graphs[key] = graph
        log.info("cuda_graph_captured", batch_size=key[0], num_splits=key[1], num_graphs=len(self._graphs))
        return graph

    def _in_shared_memory(self, logits: Logits) -> Logits:
        """Copy the logits to where those of all graphs are: each graph would keep memory for its own."""
        values = logits.values
        if self._values is None:  # the run before the first capture
            self._values = values.new_empty(self.max_batch_size, values.shape[1])
        return logits._replace(values=self._values[: len(values)].copy_(values))


def cuda_capture(device: torch.device) -> Capture:
    """Return a function that captures on `device`. All graphs share one memory pool: their steps never overlap."""
    pool: Any = torch.cuda.graph_pool_handle()

    def capture(run: Run) -> tuple[Logits, Callable[[], object]]:
        side, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            run()  # compiles kernels and allocates what libraries need, which a capture cannot
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the worker wait for events at the same time.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            logits = run()
        return logits, graph.replay

    return capture
