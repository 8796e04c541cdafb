"""Runners of `--deterministic`: tokens and log-probabilities of a request do not depend on what else a step computes.

The fused forward pass keeps every sum of a row in one order (`cpu.linear.pack_by_row`, native attention), so its steps
stay as they are; the sampler runs row by row. The products of transformers' modules depend on the number of rows, so
these compute one token at a time. docs/deterministic.md has the contract.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import structlog
import torch

from lineclear.model_files import fingerprint
from lineclear.process.settings_base import ConfigurationError
from lineclear.wire.messages import Hello
from lineclear.worker.attention.base import Batch, IntArray
from lineclear.worker.cpu.thread_tuner import openmp_setter
from lineclear.worker.kernels.native_library import library_name
from lineclear.worker.model.loaded_model import LoadedModel, ModelForward
from lineclear.worker.sampling.logits import Logits, with_argmax
from lineclear.worker.sampling.sampler import Sampled, sample
from lineclear.worker.sampling.sampling_metadata import SamplingMetadata, SamplingTableByRow

from .input_batch import PackedInputs
from .model_runner import ModelRunner
from .scores_and_vectors import ReportedRows, RowOutputsByRow

log = structlog.get_logger(__name__)


class DeterministicRunner(ModelRunner):
    """A runner for the fused forward pass, whose rows are independent of each other and of the threads."""

    def __init__(self, loaded: LoadedModel, *args: Any, **kwargs: Any) -> None:
        """As ModelRunner. Raises ConfigurationError for another attention backend."""
        super().__init__(loaded, *args, **kwargs)
        if loaded.decoder is not None and self.backend_name != "native":
            raise ConfigurationError(
                f"--deterministic: the sums of {self.backend_name} attention depend on the batch; set"
                " --attention-backend native and a --block-size that is a multiple of 16, or --no-fused-forward"
                " to compute one token at a time"
            )
        put = self._batch.staging.put
        self._sampling = SamplingTableByRow(self.capacity.num_slots, loaded.vocab_size, loaded.device, put)
        self._row_outputs = RowOutputsByRow(self._batch.flat_tokens, loaded.device)
        self._set_threads, self._sample = openmp_setter(), self._sample_on_one_thread
        by_torch = [] if loaded.decoder is not None else [torch.__version__, str(torch.get_num_threads())]
        self._arithmetic = library_name(), *by_torch
        """What the last bits depend on, apart from the model."""

    def hello(self, epoch: int) -> Hello:
        """Return the Hello of a model of its own: only a worker with the same arithmetic continues its answers."""
        hello = super().hello(epoch)
        if not hello.model_fingerprint:
            return hello
        parts = hello.model_fingerprint, "deterministic", *self._arithmetic
        return replace(hello, model_fingerprint=fingerprint.combined(parts))

    def _sample_on_one_thread(self, logits: Logits, metadata: SamplingMetadata, *args: Any) -> Sampled:
        if metadata.is_greedy:
            return sample(logits, metadata, *args)
        with self._one_thread():
            return sample(logits, metadata, *args)

    @contextlib.contextmanager
    def _one_thread(self) -> Iterator[None]:
        """torch divides a long sum of one row among its threads, whose number changes from step to step."""
        if self._set_threads is None:  # then it does not change
            yield
            return
        before = torch.get_num_threads()
        self._set_threads(1)
        try:
            yield
        finally:
            self._set_threads(before)


class OneTokenRunner(DeterministicRunner):
    """A runner for transformers' modules: one token passes all layers, then the next one of the step."""

    def _logits(self, packed: PackedInputs) -> tuple[Logits | None, ReportedRows | None]:
        forward = self._forward(packed)
        reported = self._row_outputs.compute(packed.output_rows, forward) if packed.output_rows else None
        return forward.logits(packed.sample_rows) if packed.sample_slots else None, reported

    def _forward(self, packed: PackedInputs) -> ModelForward:
        first, forwards = np.zeros(1, np.int64), dict[int, ModelForward]()
        # By position: a row may share blocks that another row of this step fills.
        for token, batch in sorted(enumerate(_tokens(packed.batch)), key=lambda x: int(packed.positions[x[0]])):
            one = slice(token, token + 1)
            self._backend.start_step(batch)
            if self._states is not None:
                self._states.start_step(batch)
            if packed.adapters is not None:
                self._adapters.start_step(packed.adapters[one])
            inputs = packed.read_indices[one], packed.positions[one]
            forwards[token] = self._loaded.forward(self._batch.flat_tokens, *inputs)

        def logits(rows: IntArray) -> Logits:
            return with_argmax(torch.cat([forwards[row].logits(first).values for row in rows.tolist()]))

        def hidden(rows: IntArray) -> torch.Tensor:
            return torch.cat([forwards[row].hidden(first) for row in rows.tolist()])

        return ModelForward(logits, hidden)


def _tokens(batch: Batch) -> Iterator[Batch]:
    """Return each packed token of the step as a batch of its own."""
    first, one = np.zeros(1, np.int64), np.ones(1, np.int64)
    for chunk, (count, start) in enumerate(zip(batch.num_queries.tolist(), batch.start.tolist(), strict=True)):
        token, table = int(batch.first[chunk]), batch.table[chunk : chunk + 1]
        for index in range(count):
            cells = batch.cells[token + index : token + index + 1]
            yield replace(batch, first=first, num_queries=one, start=one * (start + index), table=table, cells=cells)


def runner_type(loaded: LoadedModel, threads: int) -> type[DeterministicRunner]:
    """Return the runner that keeps the contract for this model. Raises ConfigurationError if it needs `threads`."""
    if loaded.decoder is not None:
        return DeterministicRunner
    if not threads:
        dtype = str(loaded.dtype).removeprefix("torch.")
        raise ConfigurationError(
            f"--deterministic: {loaded.family} in {dtype} is computed by torch, whose sums depend on the number of"
            " threads; set --threads, to the same number for all workers"
        )
    log.warning("one_token_at_a_time", family=loaded.family, hint="the fused forward pass keeps batches; see the docs")
    return OneTokenRunner
