"""From settings to a runner: device, number format, threads, kernels, model."""

from __future__ import annotations

import contextlib

import torch
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from lineclear.process.settings_base import ConfigurationError

from . import kernels, self_test
from .cpu.thread_tuner import ThreadTuner, openmp_setter, trying
from .host_info import usable_cores
from .model.loaded_model import LoadedModel
from .model.loader import build_fused, import_model_class, load, to_int8
from .model_runner import ModelRunner
from .settings import WorkerSettings

_STEP_TOKENS = {"cpu": 256}  # enough to multiply at full speed; more only make whoever comes next wait
_MANY_STEP_TOKENS = 2048
# With more threads oneDNN cuts a float32 row's sum into parts, so its last bits would depend on their number.
_MOST_TUNED_FLOAT32_CORES = 4
_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def warm_up(settings: WorkerSettings) -> None:
    """Do what comes before the weights: the classes of the model, the kernels, the compute threads.

    Nothing that goes wrong is reported: `make_runner` will meet it again, when it counts.
    """
    with contextlib.suppress(Exception):
        kernels.choose(settings.cpu_kernels)
    with contextlib.suppress(Exception):
        import_model_class(settings.model)


def make_runner(settings: WorkerSettings) -> ModelRunner:
    """Load the model and have it answer a question whose answer is known.

    Raises ModelRefused, SelfTestFailed, or ConfigurationError for a device, kernels or memory not there.
    """
    # Standard error is for log lines.
    disable_progress_bar()  # type: ignore[no-untyped-call]
    set_verbosity_error()  # type: ignore[no-untyped-call]
    if settings.quantization == "int8" and not settings.fused_cpu_forward:
        raise ConfigurationError("--quantization int8 needs the fused forward pass; leave --no-fused-cpu-forward away")
    torch.set_num_threads(settings.threads or usable_cores())
    try:
        kernels.choose(settings.cpu_kernels)
    except ValueError as error:
        raise ConfigurationError(f"--cpu-kernels: {error}") from None
    device = choose_device(settings.device)
    served = _prepared(settings, device)
    kv_dtype = torch.int8 if settings.kv_cache_dtype == "int8" else None
    with trying(served.weight_bytes):
        right = self_test.expected_answers(served, kv_dtype)
    runner = ModelRunner(
        served,
        num_blocks=settings.num_blocks,
        kv_cache_memory_fraction=settings.kv_cache_memory_fraction,
        block_size=settings.block_size,
        kv_prefault_tokens=settings.kv_prefault_tokens,
        num_slots=settings.max_batch_size,
        max_step_tokens=settings.target_batch_tokens or _STEP_TOKENS.get(device.type, _MANY_STEP_TOKENS),
        attention_backend=settings.attention_backend,
        kv_dtype=kv_dtype,
    )
    with trying(served.weight_bytes):
        self_test.check(runner, right, served.dtype)
    if not settings.threads and _gives_the_same_with_any_threads(served) and (set_threads := openmp_setter()):
        runner.tune_threads(ThreadTuner(set_threads))
    if settings.preallocate_kv_cache:
        runner.preallocate()
    return runner


def _gives_the_same_with_any_threads(served: LoadedModel) -> bool:
    """Whether no result depends on the number of threads: true of the products of our own forward pass."""
    return served.decoder is not None and (
        served.dtype is not torch.float32 or served.weights == "int8" or usable_cores() <= _MOST_TUNED_FLOAT32_CORES
    )


def _prepared(settings: WorkerSettings, device: torch.device) -> LoadedModel:
    def loaded() -> LoadedModel:
        return load(settings.model, device, _DTYPES[settings.dtype], settings.max_model_len)

    if settings.quantization == "int8":
        return to_int8(loaded())
    if not settings.fused_cpu_forward:
        return loaded()
    return build_fused(loaded()) or loaded()  # what did not stand the comparison has cost the model its matrices


def choose_device(name: str) -> torch.device:
    """The device that a setting means. Raises ConfigurationError when this machine has none such."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, available in there.items() if available)
    if not there[name]:
        raise ConfigurationError(f"--device {name}: this machine has no {name} device that torch can use")
    return torch.device(name)
