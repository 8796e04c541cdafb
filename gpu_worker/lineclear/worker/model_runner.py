"""The runner: plans on a device. Ties together slots, attention, model and sampling; decides none of their matters.

Everything a step needs is put on the device in launch order, and nothing waits for the device until somebody asks a
flight for its result: what a step samples reaches the next one through the token table on the device.
"""

from __future__ import annotations

import time
import traceback
from pathlib import Path

import torch
import transformers
from torch import Tensor

from lineclear.model_files import fingerprint
from lineclear.wire.messages import Hello, Logprobs, StepErrorKind, StepPlan, StepResult

from .attention import block_bytes
from .attention.registry import BACKENDS, choose
from .cpu.thread_tuner import ThreadTuner
from .input_batch import Capacity, InputBatch, PackedInputs
from .kv_prefault import KvPrefaulter
from .logits import Logits
from .memory_budget import blocks_that_fit
from .model.loaded_model import LoadedModel, ModelRefused
from .runner_interface import InflightStep, StepFailed
from .sampler import Sampled, sample
from .sampling_metadata import ParameterTable, SamplingRows

_NUMERICS = 1
"""Raised by a release that computes other numbers from the same files: answers are not resumed across it."""


class ModelRunner:
    """A Runner (see `protocol`) over a transformers model."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int = 0,
        kv_cache_memory_fraction: float = 0.0,
        block_size: int = 16,
        kv_prefault_tokens: int = 0,
        num_slots: int = 64,
        max_step_tokens: int = 2048,
        attention_backend: str = "auto",
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """num_blocks 0: as many as `kv_cache_memory_fraction` of the free memory holds. kv_dtype None: the model's.

        Raises ModelRefused where it does not fit, or no backend keeps such keys and values.
        """
        self._loaded = loaded
        self._device_type = loaded.device.type  # torch would take 10 µs and more to say it, at every step
        self._kv_dtype = kv_dtype or loaded.dtype
        num_blocks = num_blocks or _num_blocks(loaded, block_size, self._kv_dtype, num_slots, kv_cache_memory_fraction)
        self.capacity = Capacity(
            num_slots, num_blocks, block_size, loaded.max_model_len, max_step_tokens, loaded.vocab_size
        )
        kind = loaded.layers, block_size, loaded.dtype, loaded.device, self._kv_dtype
        size = block_bytes(loaded.layers, block_size, self._kv_dtype)
        try:
            self.backend_name = choose(attention_backend, *kind)
            self._backend = BACKENDS[self.backend_name](loaded.layers, num_blocks, *kind[1:])
        except ValueError as error:
            raise ModelRefused(str(error)) from error
        except (OSError, RuntimeError) as error:
            if loaded.device.type != "cpu":
                raise  # perhaps another process still has it; on a CPU more was asked for than the machine has
            raise ModelRefused(
                f"no memory is promised for {num_blocks} blocks of {size} bytes ({error}); lower --num-blocks"
            ) from error
        loaded.attach(self._backend)
        self._prefaulter = KvPrefaulter(self._backend, size, ahead_tokens=kv_prefault_tokens)
        self._batch = InputBatch(self.capacity, loaded.device)
        self._parameters = ParameterTable(num_slots, loaded.vocab_size, loaded.device)
        self._threads: ThreadTuner | None = None

    def tune_threads(self, tuner: ThreadTuner) -> None:
        """Let `tuner` set the number of compute threads of each step from now on. For a CPU."""
        self._threads = tuner

    def hello(self, epoch: int) -> Hello:
        """Capacities and versions."""
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
        )

    def _fingerprint(self) -> str:
        loaded = self._loaded
        if not loaded.weights_fingerprint:
            return ""
        formats = (str(_NUMERICS), str(loaded.dtype), loaded.weights, str(self._kv_dtype))
        return fingerprint.combined((loaded.weights_fingerprint, loaded.text_fingerprint, *formats))

    def reset(self) -> None:
        """Forget every slot. The pools keep their bytes: no cell is read before its next owner wrote it."""
        self._batch.reset()

    def preallocate(self) -> None:
        """Have the system give all memory of the KV pools now, and not when a step first writes there.

        Raises ConfigurationError where there is less.
        """
        self._prefaulter.prefault_all()

    def idle_work(self) -> bool:
        """Have the system give some memory of blocks that no step has begun yet. Whether there is more to be given."""
        return self._prefaulter.prefault_ahead(self._batch.num_touched_blocks)

    def launch(self, plan: StepPlan) -> InflightStep:
        """Run the plan (CPU) or put it on the device's stream (CUDA). Raises StepFailed."""
        self._batch.check(plan)
        stopwatch = _Stopwatch(self._loaded.device, self._device_type)
        if self._threads is not None:
            self._threads.begin(plan.num_tokens)
        try:
            rows, sampled = self._step(plan)
            flight = _Flight(plan, rows, sampled, stopwatch)
        except Exception as error:
            raise _step_failed(error) from error
        if self._threads is not None:
            self._threads.end(plan.num_tokens)
        return flight

    def _step(self, plan: StepPlan) -> tuple[SamplingRows, Sampled | None]:
        if plan.zero_blocks:
            self._backend.zero(plan.zero_blocks)
        for init in plan.inits:
            self._parameters.enter(init.slot, init.sampling)
        packed = self._batch.apply(plan)
        rows = self._parameters.select(packed.sample_slots, packed.sample_positions, self._batch.prompt_len)
        if not len(packed.reads):
            return rows, None
        logits = self._logits(packed)
        if not rows.num_rows:
            return rows, None
        sampled = sample(logits, rows, self._batch.tokens)
        self._batch.write_sampled(packed, sampled.tokens if sampled.host_tokens is None else sampled.host_tokens)
        return rows, sampled

    def _logits(self, packed: PackedInputs) -> Logits:
        self._backend.begin(packed.batch)
        return self._loaded.logits(self._batch.flat_tokens, packed.reads, packed.positions, packed.sample_rows)


def _num_blocks(loaded: LoadedModel, block_size: int, kv_dtype: torch.dtype, num_slots: int, fraction: float) -> int:
    """From the free memory, but at most twice what all slots can fill: more would only be more to manage."""
    size = block_bytes(loaded.layers, block_size, kv_dtype)
    most = 2 * num_slots * -(-loaded.max_model_len // block_size)
    count = blocks_that_fit(size, most, fraction, loaded.device)
    if count < 1:
        raise ModelRefused(f"after loading, the free memory does not hold one KV block of {size} bytes")
    return count


class _Stopwatch:
    """Times a step where it runs: on the device's own clock on CUDA, on the host's elsewhere."""

    def __init__(self, device: torch.device, device_type: str) -> None:
        self._device, self._device_type = device, device_type
        self._begin = self._event()
        self._end: torch.cuda.Event | None = None
        self._began_at = time.perf_counter()
        self._ended_at = self._began_at

    def stop(self) -> bool:
        """Everything of the step has been launched. Whether it is done, too."""
        self._end = self._event()
        self._ended_at = time.perf_counter()
        return self._device_type == "cpu"

    def wait(self) -> float:
        """Wait until the step is done; its seconds."""
        if self._begin is None or self._end is None:
            return self._ended_at - self._began_at
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1000

    def _event(self) -> torch.cuda.Event | None:
        if self._device_type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


class _Flight:
    """A launched step: its outputs are on their way to the host."""

    is_over: bool
    """A CPU computes while it launches."""

    def __init__(self, plan: StepPlan, rows: SamplingRows, sampled: Sampled | None, stopwatch: _Stopwatch) -> None:
        self._plan = plan
        self._rows = rows
        self._outputs = sampled if sampled is None or sampled.host_tokens is not None else _all_to_host(sampled)
        self._stopwatch = stopwatch
        self.is_over = stopwatch.stop()
        # A CPU's outputs lie in memory that the next step writes to.
        self._result = self._finish() if self.is_over else None

    def result(self) -> StepResult:
        """Wait for the device, then the tokens in the plan's order."""
        return self._result or self._finish()

    def _finish(self) -> StepResult:
        try:
            seconds = self._stopwatch.wait()
        except Exception as error:  # errors of a GPU surface where it is waited for
            raise _step_failed(error) from error
        epoch, step = self._plan.epoch, self._plan.step
        if self._outputs is None:
            return StepResult(epoch, step, (), step_seconds=seconds)
        return StepResult(
            epoch=epoch,
            step=step,
            tokens=tuple(
                self._outputs.tokens.tolist() if self._outputs.host_tokens is None else self._outputs.host_tokens
            ),
            logprobs=self._logprobs(self._outputs),
            bad_rows=_rows_where(self._outputs.bad),
            step_seconds=seconds,
        )

    def _logprobs(self, outputs: Sampled) -> tuple[Logprobs | None, ...]:
        if outputs.logprobs is None or outputs.top_ids is None or outputs.top_logprobs is None:
            return ()
        entries: list[Logprobs | None] = [None] * self._rows.num_rows
        columns = (outputs.logprobs.tolist(), outputs.top_ids.tolist(), outputs.top_logprobs.tolist())
        for row, count, chosen, ids, values in zip(self._rows.asked, self._rows.num_top, *columns, strict=True):
            entries[row] = Logprobs(chosen, tuple(zip(ids[:count], values[:count], strict=True)))
        return tuple(entries)


def _rows_where(bad: Tensor | None) -> frozenset[int]:
    return frozenset() if bad is None else frozenset(row for row, is_bad in enumerate(bad.tolist()) if is_bad)


def _all_to_host(sampled: Sampled) -> Sampled:
    """What the host does not know yet."""
    maybe = sampled.bad, sampled.logprobs, sampled.top_ids, sampled.top_logprobs
    bad, logprobs, top_ids, top_logprobs = (None if x is None else _to_host(x) for x in maybe)
    return Sampled(_to_host(sampled.tokens), bad, logprobs, top_ids, top_logprobs)


def _to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, complete when the step is. On a CPU the tensor itself."""
    if tensor.device.type != "cuda":
        return tensor.cpu() if tensor.device.type != "cpu" else tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _step_failed(error: Exception) -> StepFailed:
    """The error as the scheduler may see it: kind, type and place, nothing of what was computed."""
    if isinstance(error, StepFailed):
        return error
    out_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "unknown place"
    kind = StepErrorKind.OUT_OF_MEMORY if out_of_memory else StepErrorKind.EXCEPTION
    return StepFailed(kind, f"{type(error).__name__} at {place}")
