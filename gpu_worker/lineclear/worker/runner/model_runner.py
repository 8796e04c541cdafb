"""Runs plans on a device: input batch, attention, model and sampler in one step.

All work of a step is queued on the device in launch order, without waiting. Sampled tokens reach the next step through
the token table on the device; the host waits only in `InflightStep.result`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers

from lineclear.model_files import fingerprint
from lineclear.model_files.adapter_files import AdapterFilesRefused
from lineclear.wire.messages import BlockCopy, Hello, Row, SlotInit, StepPlan
from lineclear.worker.attention.base import AttentionBackend, block_bytes
from lineclear.worker.attention.registry import BACKENDS, choose
from lineclear.worker.cpu.thread_tuner import ThreadTuner
from lineclear.worker.device.gpus import device_name
from lineclear.worker.device.memory_budget import free_bytes
from lineclear.worker.device.staging import Put, Staging
from lineclear.worker.drafts.prompt_lookup import PromptLookupDrafter
from lineclear.worker.drafts.verification import NO_DRAFTS, Drafter, Drafts
from lineclear.worker.kv_cache.host_blocks import HostBlocks
from lineclear.worker.kv_cache.kv_prefault import KvPrefaulter
from lineclear.worker.kv_cache.pool_memory import RunnerOptions as RunnerOptions
from lineclear.worker.kv_cache.pool_memory import capacity_of, fitting_snapshots, memory_figures
from lineclear.worker.kv_cache.slot_table import Capacity, SlotTable
from lineclear.worker.loop.runner_interface import InflightStep
from lineclear.worker.lora.adapter_set import AdapterSet
from lineclear.worker.model.decode_graphs import DecodeGraphs
from lineclear.worker.model.loaded_model import LoadedModel, ModelRefused
from lineclear.worker.sampling.logits import Logits
from lineclear.worker.sampling.sampler import Sampled, sample
from lineclear.worker.sampling.sampling_metadata import SamplingTable
from lineclear.worker.structured_output.grammar_compiler import GrammarCompiler
from lineclear.worker.structured_output.grammar_constraints import ConstraintTable

from .draft_model import DraftModelDrafter
from .input_batch import InputBatch, PackedInputs
from .launched_step import LaunchedStep, StepOutputs, StepTimer, rows_where, step_failed
from .scores_and_vectors import ReportedRows, RowOutputs

if TYPE_CHECKING:
    from lineclear.worker.recurrent.states import RecurrentStates

_NUMERICS_VERSION = 2
"""Raised by a release that computes different numbers from the same files. Answers are not resumed across versions."""


class ModelRunner:
    _sample: Callable[..., Sampled] = staticmethod(sample)
    load_seconds = 0.0
    """From the start of the process until this runner was ready."""

    def __init__(
        self,
        loaded: LoadedModel,
        options: RunnerOptions = RunnerOptions(),  # noqa: B008 (it is frozen)
        *,
        drafter: Drafter | None = None,
        draft_model: LoadedModel | None = None,
        staging: Staging | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """Allocate the KV pools. `draft_model` or `drafter` replaces prompt lookup.

        `staging` None: that of the device. `graphs` None: each step launches its operations one by one.
        Raises ModelRefused or ConfigurationError if the pools do not fit or no backend supports `kv_dtype`.
        """
        self._loaded, self._graphs = loaded, graphs
        self._device_type = loaded.device.type  # torch takes 10 µs or more to return it, at every step
        self._kv_dtype = options.kv_dtype or loaded.dtype
        size = max(1, block_bytes(loaded.layers, options.block_size, self._kv_dtype))  # 0 without attention
        options = replace(options, num_state_snapshots=fitting_snapshots(loaded, options))
        self.capacity = capacity_of(loaded, options, draft_model, size)
        blocks = self.capacity.num_blocks + (graphs is not None)  # one for padding rows
        self.backend_name, self._backend = _make_backend(loaded, options, self._kv_dtype, blocks)
        host_blocks = _make_host_blocks(self._backend, self.capacity, size) if options.swap_memory_bytes else None
        self._copy_blocks = host_blocks.copy if host_blocks else self._backend.copy
        self._swap_seconds = host_blocks.block_seconds if host_blocks else 0.0
        self._prefaulter = KvPrefaulter(self._backend, size, ahead_tokens=options.kv_prefault_tokens)
        self._adapters = AdapterSet(loaded.model, loaded.dtype, loaded.device, has_hooks=loaded.decoder is None)
        if loaded.decoder is not None:
            loaded.decoder.use_adapters(self._adapters)
        self._batch = InputBatch(self.capacity, loaded.device, self._adapters, staging)
        put = self._backend.put = self._adapters.put = self._batch.staging.put
        self._states = _make_states(loaded, self.capacity, put)
        loaded.attach(self._backend, self._states)
        self.snapshots = self._batch.slots.snapshots
        self._sampling = SamplingTable(options.num_slots, loaded.vocab_size, loaded.device, put)
        self._row_outputs = RowOutputs(self._batch.flat_tokens, loaded.device)
        self._grammars = GrammarCompiler(loaded.directory, loaded.vocab_size, loaded.eos_token_ids)
        self._constraints = ConstraintTable(self._grammars, loaded.vocab_size)
        self._draft_model_id = draft_model.model_id if draft_model else ""
        self._drafter = drafter or _make_drafter(loaded, draft_model, options, self._batch)
        self._drafting = set[int]()  # slots that the drafter may know
        self._memory = memory_figures(loaded, options, draft_model, self.capacity)
        self.thread_tuner: ThreadTuner | None = None
        """Sets the number of compute threads of each step, on CPUs."""

    def hello(self, epoch: int) -> Hello:
        loaded = self._loaded
        return Hello(
            epoch=epoch,
            **(self.capacity._asdict() | self._memory),
            eos_token_ids=loaded.eos_token_ids,
            model_id=loaded.model_id,
            family=loaded.family,
            dtype=loaded.weights or str(loaded.dtype).removeprefix("torch."),
            device=device_name(loaded.device),
            attention_backend=self.backend_name + (", int8 KV" if self._kv_dtype is torch.int8 else ""),
            torch_version=torch.__version__,
            transformers_version=transformers.__version__,
            model_fingerprint=_fingerprint(loaded, self._kv_dtype),
            text_fingerprint=loaded.text_fingerprint,
            draft_model=self._draft_model_id,
            swap_seconds=self._swap_seconds,
            forward_pass=_forward_pass(loaded, self._graphs),
            forward_pass_reason=loaded.modules_reason,
            load_seconds=self.load_seconds,
        )

    def reset(self) -> None:
        """Free every slot and drop all adapters. Pools stay: no cell is read before its next owner writes it."""
        self._batch.reset()
        self._row_outputs.reset()
        self._constraints.reset()
        self._adapters.clear()
        self._drafter.reset()
        self._drafting.clear()

    def prepare(self, grammar: str, done: Callable[[], None]) -> None:
        self._grammars.prepare(grammar, done)

    def load_adapter(self, index: int, key: bytes, path: str) -> None:
        try:
            with torch.inference_mode():
                self._adapters.load(index, key, Path(path))
        except (torch.OutOfMemoryError, MemoryError):
            raise AdapterFilesRefused("the worker has too little memory for it") from None
        except torch.AcceleratorError as error:  # of a step before, as a rule
            raise step_failed(error) from error

    def unload_adapter(self, index: int) -> None:
        self._adapters.unload(index)

    def preallocate(self) -> None:
        """Fault in all memory of the KV pools now. Raises ConfigurationError if the free memory does not suffice."""
        self._prefaulter.prefault_all()

    def idle_work(self) -> bool:
        """Fault in some memory of blocks that no plan has used yet. Returns whether work is left."""
        return self._prefaulter.prefault_ahead(self._batch.slots.num_touched_blocks)

    def launch(self, plan: StepPlan) -> InflightStep:
        """Run the plan (CPU) or queue it on the device's stream (CUDA). Raises StepFailed."""
        self._batch.slots.check(plan)
        if self.thread_tuner is not None:
            self.thread_tuner.start_step(plan.num_tokens)
        try:
            if plan.copy_blocks:
                self._copy_blocks(plan.copy_blocks)  # first: the plan may zero a source
            if plan.copy_states and self._states is not None:
                self._states.copy(plan.copy_states)
            # Behind the copies: its time predicts those of other steps.
            timer = StepTimer(self._loaded.device, self._device_type)
            drafts, draft_seconds = self._timed_drafts(plan)
            inflight = LaunchedStep(plan, self._step(plan, drafts), draft_seconds, timer)
        except Exception as error:
            raise step_failed(error) from error
        if self.thread_tuner is not None:
            self.thread_tuner.finish_step(plan.num_tokens)
        return inflight

    def _timed_drafts(self, plan: StepPlan) -> tuple[Drafts, float]:
        """Return the drafts of the plan's rows and the seconds to make them."""
        rows = [row for row in plan.chunks if row.num_drafts]
        # Vectors add up over rows: such a step cannot be computed a second time.
        if not rows or any(row.is_reported for row in plan.chunks):
            return NO_DRAFTS, 0.0
        started_at = time.perf_counter()
        # A matcher follows the samples of its slot one by one, and has no mask for the position behind a draft.
        free = [row for row in rows if row.slot not in self._constraints.slots]
        self._drafting.update(row.slot for row in free)
        drafts = self._drafts(free)
        return drafts, time.perf_counter() - started_at

    def _drafts(self, rows: Sequence[Row]) -> Drafts:
        return self._drafter.propose(rows, self._batch.read_tokens)

    def _step(self, plan: StepPlan, drafts: Drafts) -> StepOutputs:
        if plan.zero_blocks:
            self._backend.zero(plan.zero_blocks)
        if plan.inits:
            self._set_slots(plan.inits)
        self._batch.staging.begin()
        packed = self._batch.apply(plan, drafts, self._graphs.padded if self._graphs else None)
        outputs = self._compute(packed, drafts)
        sampled = outputs.sampled
        reads_drafts = self._backend.reads_unwritten_cells  # for the tokens before them
        if drafts and reads_drafts and sampled is not None and sampled.bad is not None and bool(sampled.bad.any()):
            # Values of a wrong draft may be non-finite. Cells of later positions were not written.
            _zero_from(self._backend, self._batch.slots.draft_cells(plan, drafts))
            self._batch.staging.begin()
            packed = self._batch.without_drafts(plan)
            outputs = self._compute(packed, NO_DRAFTS)
            sampled = outputs.sampled
        if sampled is None:
            return outputs
        self._batch.write_sampled(packed, sampled.tokens, sampled.host_tokens)
        if sampled.deferred:
            _defer(self._batch.slots, self._backend, packed, sampled)
        learn = self._batch.learner(packed)
        return outputs if learn is None else outputs._replace(learn=learn)

    def _set_slots(self, inits: Sequence[SlotInit]) -> None:
        for init in inits:
            self._sampling.set_slot(init.slot, init.sampling)
            if init.sampling.grammar or init.slot in self._constraints.slots:
                self._constraints.set_slot(init)
            if init.slot in self._drafting:
                self._drafting.remove(init.slot)
                self._drafter.forget(init.slot)
        self._row_outputs.set_slots(inits)

    def _compute(self, packed: PackedInputs, drafts: Drafts) -> StepOutputs:
        """Queue the forward pass over the packed rows, and the sampler."""
        if len(packed.read_indices):
            if self._states is not None:  # first, so that it puts its array where graphs have it from
                self._states.start_step(packed.batch)
            self._backend.start_step(packed.batch)
        metadata = self._sampling.select(packed.sample_slots, packed.sample_positions, self._batch.slots.prompt_len)
        if not len(packed.read_indices):
            self._batch.send()
            return StepOutputs(metadata, None, None, drafts)
        pending, restore = None, None
        if self._constraints.slots:
            fetch = partial(self._batch.fetch_last_tokens, packed)
            singles = None if self._states is None else self._states.single_slots
            pending = self._constraints.start(packed.sample_slots, packed.sample_positions, fetch, singles)
            if pending is not None and pending.held and self._states is not None:
                restore = self._states.hold(pending.held)
        if packed.adapters is not self._adapters.rows:
            self._adapters.start_step(packed.adapters)
        self._batch.send()
        logits, reported = self._logits(packed)
        if logits is None:
            return StepOutputs(metadata, None, reported, drafts)
        if pending is None:
            sampled = self._sample(logits, metadata, self._batch.tokens)
        else:
            masks = pending.result()
            sampled = self._sample(logits, metadata, self._batch.tokens, masks)
            if masks.deferred:
                sampled = sampled._replace(deferred=masks.deferred, void=masks.void)
                if restore is not None:
                    restore({packed.sample_slots[row] for row in masks.deferred})
        return StepOutputs(metadata, sampled, reported, drafts)

    def _logits(self, packed: PackedInputs) -> tuple[Logits | None, ReportedRows | None]:
        """Return the logits of the sampling rows, if any, and the outputs of the other rows."""
        arrays = packed.on_device or packed
        inputs = self._batch.flat_tokens, arrays.read_indices, arrays.positions
        if packed.is_padded and self._graphs is not None and packed.on_device is not None:
            states = self._states
            changing = (*packed.on_device[:3], *self._backend.step_inputs, *(states.step_inputs if states else ()))
            num_splits = self._backend.num_splits if packed.adapters is None else None
            run = partial(self._loaded.logits, *inputs, arrays.sample_rows)
            keep = states.keep if states else None
            return self._graphs.logits(len(packed.sample_slots), num_splits, changing, run, keep), None
        if not packed.output_rows:
            logits = self._loaded.logits(*inputs, arrays.sample_rows)
            return logits if packed.sample_slots else None, None
        forward = self._loaded.forward(*inputs)
        reported = self._row_outputs.compute(packed.output_rows, forward)
        return forward.logits(packed.sample_rows) if packed.sample_slots else None, reported


def _defer(table: SlotTable, backend: AttentionBackend, packed: PackedInputs, sampled: Sampled) -> None:
    """Let rows that sampled nothing be planned again; zero what is not finite behind them.

    The input of a void row is not the token of its sequence, and some backends read its values for tokens before.
    """
    slots, positions = packed.sample_slots, packed.sample_positions
    for row in sampled.deferred:
        table.defer(slots[row], positions[row])
    if sampled.void:
        bad = rows_where(sampled.bad).intersection(sampled.void)
        _zero_from(backend, [table.cell(slots[row], positions[row] - 1) for row in sorted(bad)])


def _zero_from(backend: AttentionBackend, cells: Iterable[tuple[int, int]]) -> None:
    """Zero blocks from a place in each of them on."""
    cells = list(cells)
    if whole := [block for block, first in cells if not first]:
        backend.zero(whole)
    if partial_blocks := [BlockCopy(block, block, first) for block, first in cells if first]:
        backend.copy(partial_blocks)


def _make_states(loaded: LoadedModel, c: Capacity, put: Put) -> RecurrentStates | None:
    """Return the recurrent states; None for a model without. Raises ModelRefused if the system refuses the memory."""
    try:
        states = loaded.make_states(c.num_slots, c.num_state_snapshots, -(-c.max_model_len // c.block_size))
    except RuntimeError as error:
        if loaded.device.type != "cpu":
            raise  # as in `_make_backend`
        count = c.num_slots + 1 + c.num_state_snapshots
        raise ModelRefused(
            f"the system refuses memory for {count} recurrent states of {loaded.state_bytes} bytes ({error});"
            " lower --max-batch-size"
        ) from error
    if states is not None:
        states.put = put
    return states


def _make_drafter(loaded: LoadedModel, draft: LoadedModel | None, options: RunnerOptions, batch: InputBatch) -> Drafter:
    if loaded.recurrent:
        return Drafter()
    if draft is None:
        return PromptLookupDrafter(*options.prompt_lookup_ngrams)
    # As many as it computes in about the time of a full step of the served model.
    max_catch_up = options.max_step_tokens * max(1, loaded.weight_bytes // max(1, draft.weight_bytes))
    return DraftModelDrafter(draft, batch, max_catch_up)


def _make_backend(
    loaded: LoadedModel, options: RunnerOptions, kv_dtype: torch.dtype, num_blocks: int
) -> tuple[str, AttentionBackend]:
    """Return the name of the attention backend, and the backend with its KV pools. Raises ModelRefused."""
    kind = options.block_size, loaded.dtype, loaded.device, kv_dtype
    try:
        name = choose(options.attention_backend, loaded.layers, *kind)
        return name, BACKENDS[name](loaded.layers, num_blocks, *kind)
    except ValueError as error:
        raise ModelRefused(str(error)) from error
    except (OSError, RuntimeError) as error:
        if loaded.device.type != "cpu":
            raise  # another process may still hold the memory; on a CPU the request exceeds the machine
        size = block_bytes(loaded.layers, options.block_size, kv_dtype)
        raise ModelRefused(
            f"the system refuses memory for {num_blocks} blocks of {size} bytes ({error}); lower --num-blocks"
        ) from error


def _make_host_blocks(backend: AttentionBackend, capacity: Capacity, size: int) -> HostBlocks:
    """Return host blocks of `size` bytes. Raises ModelRefused if the memory is too small for one, or not free."""
    count, free = capacity.num_swap_blocks, free_bytes(torch.device("cpu"))
    if not count:
        raise ModelRefused(f"--swap-memory-bytes does not hold one KV block of {size} bytes; raise it, or set it to 0")
    if count * size > free:
        raise ModelRefused(f"--swap-memory-bytes: {count * size} bytes are needed, {free} are free; lower it")
    try:
        return HostBlocks(backend, capacity.num_blocks, count)
    except RuntimeError as error:
        raise ModelRefused(f"the system refuses {count * size} bytes ({error}); lower --swap-memory-bytes") from error


def _forward_pass(loaded: LoadedModel, graphs: DecodeGraphs | None) -> str:
    name = "modules" if loaded.decoder is None else "fused"
    return f"{name}, CUDA graphs" if graphs and graphs.max_batch_size else name


def _fingerprint(loaded: LoadedModel, kv_dtype: torch.dtype) -> str:
    if not loaded.weights_fingerprint:
        return ""
    formats = (str(_NUMERICS_VERSION), str(loaded.dtype), loaded.weights, str(kv_dtype))
    return fingerprint.combined((loaded.weights_fingerprint, loaded.text_fingerprint, *formats))
