"""Runs plans on a device: input batch, attention, model and sampler in one step.

All work of a step is queued on the device in launch order, without waiting. Sampled tokens reach the next step through
the token table on the device; the host waits only in `InflightStep.result`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import transformers
from torch import Tensor

from lineclear.model_files import fingerprint
from lineclear.model_files.adapter_files import AdapterFilesRefused
from lineclear.process.exception_location import exception_summary
from lineclear.wire.messages import BlockCopy, Hello, Logprobs, Row, RowOutput, StepErrorKind, StepPlan, StepResult

from .attention.base import block_bytes
from .attention.registry import BACKENDS, choose
from .constraints import ConstraintTable
from .cpu.thread_tuner import ThreadTuner
from .draft_model import DraftModelDrafter, max_catch_up
from .drafts.drafter import Drafter, PromptLookupDrafter
from .drafts.verification import NO_DRAFTS, Drafts, verified
from .grammar_compiler import GrammarCompiler
from .input_batch import Capacity, InputBatch, PackedInputs
from .kv_prefault import KvPrefaulter
from .logits import Logits
from .lora.adapter_set import AdapterSet
from .memory_budget import blocks_that_fit
from .model.loaded_model import LoadedModel, ModelRefused
from .row_outputs import ReportedRows, RowOutputs, ScoreColumns, to_result
from .runner_interface import InflightStep, StepFailed
from .sampler import Sampled, sample
from .sampling_metadata import SamplingMetadata, SamplingTable
from .step_timer import StepTimer

_NUMERICS_VERSION = 1
"""Raised by a release that computes different numbers from the same files. Answers are not resumed across versions."""


class ModelRunner:
    """A `Runner` for a transformers model."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int = 0,
        kv_cache_memory_fraction: float = 0.0,
        num_workers: int = 1,
        block_size: int = 16,
        kv_prefault_tokens: int = 0,
        num_slots: int = 64,
        max_step_tokens: int = 2048,
        attention_backend: str = "auto",
        kv_dtype: torch.dtype | None = None,
        prompt_lookup_ngrams: tuple[int, int] = (4, 2),
        drafter: Drafter | None = None,
        draft_model: LoadedModel | None = None,
    ) -> None:
        """Allocate the KV pools. num_blocks 0: as many as fit in `kv_cache_memory_fraction` of the free memory.

        `num_workers` workers of this device divide that memory. `prompt_lookup_ngrams`: longest and shortest n-gram.
        `draft_model` or `drafter` replaces prompt lookup.
        kv_dtype None: the model's. Raises ModelRefused if the pools do not fit or no backend supports `kv_dtype`.
        """
        self._loaded = loaded
        self._device_type = loaded.device.type  # torch takes 10 µs or more to return it, at every step
        self._kv_dtype = kv_dtype or loaded.dtype
        fraction = kv_cache_memory_fraction
        size = block_bytes(loaded.layers, block_size, self._kv_dtype)
        draft_size = block_bytes(draft_model.layers, block_size, draft_model.dtype) if draft_model else 0
        num_blocks = num_blocks or _num_blocks(loaded, block_size, size + draft_size, num_slots, fraction, num_workers)
        self.capacity = Capacity(
            num_slots, num_blocks, block_size, loaded.max_model_len, max_step_tokens, loaded.vocab_size
        )
        kind = loaded.layers, block_size, loaded.dtype, loaded.device, self._kv_dtype
        try:
            self.backend_name = choose(attention_backend, *kind)
            self._backend = BACKENDS[self.backend_name](loaded.layers, num_blocks, *kind[1:])
        except ValueError as error:
            raise ModelRefused(str(error)) from error
        except (OSError, RuntimeError) as error:
            if loaded.device.type != "cpu":
                raise  # another process may still hold the memory; on a CPU the request exceeds the machine
            raise ModelRefused(
                f"the system refuses memory for {num_blocks} blocks of {size} bytes ({error}); lower --num-blocks"
            ) from error
        loaded.attach(self._backend)
        self._prefaulter = KvPrefaulter(self._backend, size, ahead_tokens=kv_prefault_tokens)
        self._adapters = AdapterSet(loaded.model, loaded.dtype, loaded.device, has_hooks=loaded.decoder is None)
        if loaded.decoder is not None:
            loaded.decoder.use_adapters(self._adapters)
        self._batch = InputBatch(self.capacity, loaded.device, self._adapters)
        self._sampling = SamplingTable(num_slots, loaded.vocab_size, loaded.device)
        self._row_outputs = RowOutputs(self._batch.flat_tokens, loaded.device)
        self._grammars = GrammarCompiler(loaded.directory, loaded.vocab_size, loaded.eos_token_ids)
        self._constraints = ConstraintTable(self._grammars, loaded.vocab_size)
        self._draft_model_id = draft_model.model_id if draft_model else ""
        self._drafter = drafter or self._make_drafter(draft_model, prompt_lookup_ngrams)
        self._thread_tuner: ThreadTuner | None = None

    def _make_drafter(self, draft_model: LoadedModel | None, ngrams: tuple[int, int]) -> Drafter:
        if draft_model is None:
            return PromptLookupDrafter(*ngrams)
        catch_up = max_catch_up(self._loaded, draft_model, self.capacity.max_step_tokens)
        return DraftModelDrafter(draft_model, self._batch, catch_up)

    def tune_threads(self, tuner: ThreadTuner) -> None:
        """Let `tuner` set the number of compute threads of each step. For CPUs."""
        self._thread_tuner = tuner

    def hello(self, epoch: int) -> Hello:
        """Return the capacities and versions of this worker."""
        c, loaded = self.capacity, self._loaded
        return Hello(
            epoch=epoch,
            num_blocks=c.num_blocks,
            block_size=c.block_size,
            num_slots=c.num_slots,
            max_model_len=c.max_model_len,
            vocab_size=c.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            max_step_tokens=c.max_step_tokens,
            model_id=loaded.model_id,
            family=loaded.family,
            dtype=loaded.weights or str(loaded.dtype).removeprefix("torch."),
            device=_device_name(loaded.device),
            attention_backend=self.backend_name + (", int8 KV" if self._kv_dtype is torch.int8 else ""),
            torch_version=torch.__version__,
            transformers_version=transformers.__version__,
            model_fingerprint=self._fingerprint(),
            text_fingerprint=loaded.text_fingerprint,
            draft_model=self._draft_model_id,
        )

    def _fingerprint(self) -> str:
        loaded = self._loaded
        if not loaded.weights_fingerprint:
            return ""
        formats = (str(_NUMERICS_VERSION), str(loaded.dtype), loaded.weights, str(self._kv_dtype))
        return fingerprint.combined((loaded.weights_fingerprint, loaded.text_fingerprint, *formats))

    def reset(self) -> None:
        """Free every slot and drop all adapters.

        The pools keep their contents: no cell is read before its next owner writes it.
        """
        self._batch.reset()
        self._row_outputs.reset()
        self._constraints.reset()
        self._adapters.clear()
        self._drafter.reset()

    def prepare(self, grammar: str, done: Callable[[], None]) -> None:
        """Compile a grammar on another thread, which then calls `done()`."""
        self._grammars.prepare(grammar, done)

    def load_adapter(self, index: int, key: bytes, path: str) -> None:
        """Hold the adapter in directory `path` as `index`. Raises AdapterFilesRefused."""
        try:
            with torch.inference_mode():
                self._adapters.load(index, key, Path(path))
        except (torch.OutOfMemoryError, MemoryError):
            raise AdapterFilesRefused("the worker has too little memory for it") from None

    def unload_adapter(self, index: int) -> None:
        """Drop an adapter."""
        self._adapters.unload(index)

    def preallocate(self) -> None:
        """Fault in all memory of the KV pools now. Raises ConfigurationError if the free memory does not suffice."""
        self._prefaulter.prefault_all()

    def idle_work(self) -> bool:
        """Fault in some memory of blocks that no plan has used yet. Returns whether work is left."""
        return self._prefaulter.prefault_ahead(self._batch.num_touched_blocks)

    def launch(self, plan: StepPlan) -> InflightStep:
        """Run the plan (CPU) or queue it on the device's stream (CUDA). Raises StepFailed."""
        self._batch.check(plan)
        timer = StepTimer(self._loaded.device, self._device_type)
        if self._thread_tuner is not None:
            self._thread_tuner.start_step(plan.num_tokens)
        try:
            drafts, draft_seconds = self._timed_drafts(plan)
            inflight = _InflightStep(plan, *self._step(plan, drafts), draft_seconds, timer)
        except Exception as error:
            raise _step_failed(error) from error
        if self._thread_tuner is not None:
            self._thread_tuner.finish_step(plan.num_tokens)
        return inflight

    def _timed_drafts(self, plan: StepPlan) -> tuple[Drafts, float]:
        """Return the drafts of the plan's rows and the seconds to make them."""
        rows = [row for row in plan.chunks if row.num_drafts]
        if not rows:
            return NO_DRAFTS, 0.0
        started_at = time.perf_counter()
        drafts = self._drafts(plan, rows)
        return drafts, time.perf_counter() - started_at

    def _drafts(self, plan: StepPlan, rows: list[Row]) -> Drafts:
        # Vectors add up over rows: such a step cannot be computed a second time.
        if any(row.output > RowOutput.SAMPLE for row in plan.chunks):
            return NO_DRAFTS
        # A matcher follows the samples of its slot one by one, and has no mask for the position behind a draft.
        return self._drafter.propose([x for x in rows if x.slot not in self._constraints], self._batch.read_tokens)

    def _step(
        self, plan: StepPlan, drafts: Drafts
    ) -> tuple[SamplingMetadata, Sampled | None, ReportedRows | None, Drafts]:
        if plan.copy_blocks:
            self._backend.copy(plan.copy_blocks)  # first: the plan may zero a source
        if plan.zero_blocks:
            self._backend.zero(plan.zero_blocks)
        for init in plan.inits:
            self._sampling.set_slot(init.slot, init.sampling)
            self._constraints.set_slot(init)
            self._drafter.forget(init.slot)
        if plan.inits:
            self._row_outputs.set_slots(plan.inits)
        packed = self._batch.apply(plan, drafts)
        metadata, sampled, reported = self._compute(packed)
        if drafts and sampled is not None and sampled.bad is not None and bool(sampled.bad.any()):
            # Values of a wrong draft may be non-finite, and some backends read them for the tokens before it.
            self._clear_drafts(plan, drafts)
            packed, drafts = self._batch.without_drafts(plan), NO_DRAFTS
            metadata, sampled, reported = self._compute(packed)
        if sampled is not None:
            self._batch.write_sampled(packed, sampled.tokens if sampled.host_tokens is None else sampled.host_tokens)
            if sampled.deferred:
                self._defer(packed, sampled)
        return metadata, sampled, reported, drafts

    def _compute(self, packed: PackedInputs) -> tuple[SamplingMetadata, Sampled | None, ReportedRows | None]:
        metadata = self._sampling.select(packed.sample_slots, packed.sample_positions, self._batch.prompt_len)
        if not len(packed.read_indices):
            return metadata, None, None
        fetch = partial(self._batch.fetch_last_tokens, packed)
        pending = self._constraints.start(packed.sample_slots, packed.sample_positions, fetch)
        self._backend.start_step(packed.batch)
        self._adapters.start_step(packed.adapters)
        logits, reported = self._logits(packed)
        if logits is None:
            return metadata, None, reported
        if pending is None:
            return metadata, sample(logits, metadata, self._batch.tokens), reported
        masks = pending.result()
        sampled = sample(logits, metadata, self._batch.tokens, masks)
        if masks.deferred:
            sampled = sampled._replace(deferred=masks.deferred, void=masks.void)
        return metadata, sampled, reported

    def _defer(self, packed: PackedInputs, sampled: Sampled) -> None:
        """Let rows that sampled nothing be planned again; zero what is not finite behind them.

        The input of a void row is not the token of its sequence, and some backends read its values for tokens before.
        """
        places = [(packed.sample_slots[row], packed.sample_positions[row]) for row in sampled.deferred]
        for slot, position in places:
            self._batch.defer(slot, position)
        bad = _rows_where(sampled.bad) if sampled.void else frozenset[int]()
        self._zero_from(
            self._batch.cell(packed.sample_slots[row], packed.sample_positions[row] - 1)
            for row in sampled.void
            if row in bad
        )

    def _clear_drafts(self, plan: StepPlan, drafts: Drafts) -> None:
        """Zero the cells of drafts, and of later positions, which were not written."""
        self._zero_from(self._batch.draft_cells(plan, drafts))

    def _zero_from(self, cells: Iterable[tuple[int, int]]) -> None:
        """Zero blocks from a place in each of them on."""
        cells = list(cells)
        if whole := [block for block, first in cells if not first]:
            self._backend.zero(whole)
        if partial_blocks := [BlockCopy(block, block, first) for block, first in cells if first]:
            self._backend.copy(partial_blocks)

    def _logits(self, packed: PackedInputs) -> tuple[Logits | None, ReportedRows | None]:
        """Return the logits of the sampling rows, if any, and the outputs of the other rows."""
        inputs = self._batch.flat_tokens, packed.read_indices, packed.positions
        if not packed.output_rows:
            logits = self._loaded.logits(*inputs, packed.sample_rows)
            return logits if packed.sample_slots else None, None
        forward = self._loaded.forward(*inputs)
        reported = self._row_outputs.compute(packed.output_rows, forward)
        return forward.logits(packed.sample_rows) if packed.sample_slots else None, reported


def _num_blocks(
    loaded: LoadedModel, block_size: int, size: int, num_slots: int, fraction: float, num_workers: int
) -> int:
    """Return how many blocks of `size` bytes fit in the free memory, at most twice as many as all slots can fill."""
    max_blocks = 2 * num_slots * -(-loaded.max_model_len // block_size)
    count = blocks_that_fit(size, max_blocks, fraction, loaded.device, num_workers)
    if count < 1:
        raise ModelRefused(f"after loading, the free memory does not hold one KV block of {size} bytes")
    return count


class _InflightStep:
    """A launched step, whose outputs are being copied to the host."""

    is_complete: bool
    """True on a CPU, which computes during launch."""

    def __init__(
        self,
        plan: StepPlan,
        metadata: SamplingMetadata,
        sampled: Sampled | None,
        reported: ReportedRows | None,
        drafts: Drafts,
        draft_seconds: float,
        timer: StepTimer,
    ) -> None:
        self._plan, self._drafts, self._draft_seconds = plan, drafts, draft_seconds
        self._reported = None if reported is None else _reported_to_host(reported)
        self._metadata = metadata
        self._outputs = sampled if sampled is None or sampled.host_tokens is not None else _all_to_host(sampled)
        self._timer = timer
        self.is_complete = timer.stop()
        # On a CPU the next step overwrites the memory of the outputs.
        self._result = self._finish() if self.is_complete else None

    def result(self) -> StepResult:
        """Wait for the device and return the tokens in the plan's order. Raises StepFailed."""
        return self._result or self._finish()

    def _finish(self) -> StepResult:
        try:
            seconds = self._timer.wait()
        except Exception as error:  # CUDA errors are raised by the wait
            raise _step_failed(error) from error
        result = self._sampled_result(seconds)
        return result if self._reported is None else _with_reported(result, self._plan, self._reported)

    def _sampled_result(self, seconds: float) -> StepResult:
        epoch, step = self._plan.epoch, self._plan.step
        if self._outputs is None:
            return StepResult(epoch, step, (), step_seconds=seconds)
        result = StepResult(
            epoch=epoch,
            step=step,
            tokens=tuple(
                self._outputs.tokens.tolist() if self._outputs.host_tokens is None else self._outputs.host_tokens
            ),
            logprobs=self._logprobs(self._outputs),
            bad_rows=_rows_where(self._outputs.bad).difference(self._outputs.void),
            step_seconds=seconds,
            stuck_rows=_rows_where(self._outputs.stuck).difference(self._outputs.deferred),
            deferred_rows=frozenset(self._outputs.deferred),
            draft_seconds=min(self._draft_seconds, seconds),
        )
        return verified(result, self._plan, self._drafts) if self._drafts else result

    def _logprobs(self, outputs: Sampled) -> tuple[Logprobs | None, ...]:
        if outputs.logprobs is None or outputs.top_ids is None or outputs.top_logprobs is None:
            return ()
        entries: list[Logprobs | None] = [None] * self._metadata.num_rows
        columns = (outputs.logprobs.tolist(), outputs.top_ids.tolist(), outputs.top_logprobs.tolist())
        rows, num_top = self._metadata.host_logprob_rows, self._metadata.num_top
        for row, count, chosen, ids, values in zip(rows, num_top, *columns, strict=True):
            entries[row] = Logprobs(chosen, tuple(zip(ids[:count], values[:count], strict=True)))
        if outputs.id_logprobs is not None:
            found = iter(outputs.id_logprobs.tolist())
            for row, own_ids in zip(rows, self._metadata.host_logprob_ids, strict=True):
                entry = entries[row]
                assert entry is not None
                entries[row] = entry._replace(top=entry.top + tuple((i, next(found)) for i in own_ids))
        return tuple(entries)


def _with_reported(result: StepResult, plan: StepPlan, reported: ReportedRows) -> StepResult:
    """Return the result with scores and vectors, and its bad rows counted among all rows with an output."""
    scores, vectors, bad = to_result(reported)
    outputs = [row.sample for row in plan.chunks if row.output]
    sampling = [*range(len(plan.decodes.slots)), *(i for i, x in enumerate(outputs, len(plan.decodes.slots)) if x)]
    others = [i for i, x in enumerate(outputs, len(plan.decodes.slots)) if not x]
    bad_rows = frozenset([*(sampling[i] for i in result.bad_rows), *(others[i] for i in bad)])
    stuck_rows = frozenset(sampling[i] for i in result.stuck_rows)
    deferred_rows = frozenset(sampling[i] for i in result.deferred_rows)
    return replace(
        result,
        bad_rows=bad_rows,
        stuck_rows=stuck_rows,
        deferred_rows=deferred_rows,
        scores=scores,
        vectors=vectors,
    )


def _reported_to_host(reported: ReportedRows) -> ReportedRows:
    scores = None if reported.scores is None else ScoreColumns(*map(_to_host, reported.scores))
    vectors = tuple(None if vector is None else _to_host(vector) for vector in reported.vectors)
    return reported._replace(scores=scores, vectors=vectors)


def _rows_where(bad: Tensor | None) -> frozenset[int]:
    return frozenset() if bad is None else frozenset(row for row, is_bad in enumerate(bad.tolist()) if is_bad)


def _all_to_host(sampled: Sampled) -> Sampled:
    optional = sampled.bad, sampled.logprobs, sampled.top_ids, sampled.top_logprobs, sampled.id_logprobs, sampled.stuck
    bad, logprobs, top_ids, top_logprobs, ids, stuck = (None if x is None else _to_host(x) for x in optional)
    rows = sampled.deferred, sampled.void
    return Sampled(_to_host(sampled.tokens), bad, logprobs, top_ids, top_logprobs, ids, None, stuck, *rows)


def _to_host(tensor: Tensor) -> Tensor:
    """Copy `tensor` to the host, complete when the step is. On a CPU returns the tensor itself."""
    if tensor.device.type != "cuda":
        return tensor.cpu() if tensor.device.type != "cpu" else tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _step_failed(error: Exception) -> StepFailed:
    """Return the error with kind, type and source location, without its message."""
    if isinstance(error, StepFailed):
        return error
    out_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error)
    kind = StepErrorKind.OUT_OF_MEMORY if out_of_memory else StepErrorKind.EXCEPTION
    return StepFailed(kind, exception_summary(error))
