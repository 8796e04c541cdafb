"""Makes a runner from settings: device, dtype, threads, kernels, model, self-test."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from lineclear.process.private_dir import PathError, private_socket_dir
from lineclear.process.settings_base import ConfigurationError
from lineclear.worker.cpu.linear import pack_by_row
from lineclear.worker.cpu.thread_tuner import ThreadTuner, openmp_setter, probe_threads
from lineclear.worker.device import host_info
from lineclear.worker.device.gpus import choose_gpu, claim_gpu, keep_instance, visible_instances
from lineclear.worker.device.host_info import usable_cores
from lineclear.worker.device.machine_share import MachineShare, bind, claim, cores_of, named_cores
from lineclear.worker.device.memory_budget import free_bytes
from lineclear.worker.kernels import native_library as kernels
from lineclear.worker.kv_cache.pool_memory import RunnerOptions, fitting_blocks, fitting_snapshots
from lineclear.worker.model.decode_graphs import DecodeGraphs, cuda_capture
from lineclear.worker.model.loaded_model import LoadedModel
from lineclear.worker.model.loader import Divided, build_fused, import_model_class, load, to_quantized
from lineclear.worker.settings import WorkerSettings
from lineclear.worker.tensor_parallel.shard import Agree

from . import self_test
from .draft_model import check_vocabulary
from .memory_profile import largest_step_bytes, run_largest_steps
from .model_runner import ModelRunner

if TYPE_CHECKING:
    from lineclear.worker.tensor_parallel.ranks import Ranks

log = structlog.get_logger(__name__)

_MAX_STEP_TOKENS = {"cpu": 256}  # enough for full speed; larger steps only delay other requests
_MAX_STEP_TOKENS_ELSEWHERE = 2048
_PREFAULT_TOKENS = 16384  # of KV memory, while idle: several long requests, and at most 1/32 of the free memory
# With more threads oneDNN splits the sum of a float32 row, so its last bits depend on the number of threads.
_MAX_TUNED_FLOAT32_CORES = 4
_MAX_GRAPH_BATCH_SIZE = 256  # larger steps take so long that the launches do not matter
_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def warm_up(settings: WorkerSettings) -> None:
    """Load the kernels and import the model's class, ahead of the weights. `make_runner` reports any error."""
    with contextlib.suppress(Exception):
        kernels.choose(settings.cpu_kernels)
    with contextlib.suppress(Exception):
        import_model_class(settings.model)


def make_runner(settings: WorkerSettings, ranks: Ranks | None = None) -> ModelRunner:
    """Load the model, or the part of this rank, allocate its KV pools and run the self-test.

    Raises ModelRefused, SelfTestFailed, ModelFilesChanged, or ConfigurationError for a missing device, kernel library
    or memory.
    """
    # Standard error carries log lines only.
    disable_progress_bar()  # type: ignore[no-untyped-call]
    set_verbosity_error()  # type: ignore[no-untyped-call]
    if settings.quantization != "none" and not settings.fused_forward:
        raise ConfigurationError(
            f"--quantization {settings.quantization} needs the fused forward pass; remove --no-fused-forward"
        )
    share = MachineShare.parse(settings.machine_share)
    if ranks is not None:
        try:
            return _make_part(settings, share, ranks)
        except Exception:
            ranks.end_if_lost()
            raise
    device, share = _take_device(settings, share)
    if settings.deterministic and device.type != "cpu":
        raise ConfigurationError(
            f"--deterministic: matrix products on {device.type} depend on the number of rows; set --device cpu"
        )
    _claim_device(settings, device, share)
    loaded = _load(settings, device)
    draft = _load_draft(settings, device, loaded) if settings.draft_model else None
    with probe_threads(loaded.weight_bytes):
        expected = self_test.expected_answers(loaded, _kv_dtype(settings))
    options = _options(settings, device, share)
    options = _with_step_memory(options, loaded, _graphs(settings, device))
    graphs = _graphs(settings, device)
    runner = _runner_type(settings, loaded)(loaded, options, draft_model=draft, graphs=graphs)
    if graphs is not None:
        run_largest_steps(runner, graphs.max_batch_size)  # the graphs captured later use the memory of the largest
    with probe_threads(loaded.weight_bytes):
        self_test.check(runner, expected, loaded.dtype)
    if _may_tune_threads(settings, loaded) and (set_threads := openmp_setter()):
        runner.thread_tuner = ThreadTuner(set_threads)
    if settings.preallocate_kv_cache:
        runner.preallocate()
    return runner


def _make_part(settings: WorkerSettings, share: MachineShare, ranks: Ranks) -> ModelRunner:
    """Make the runner of one rank. All ranks do the same: each step of it may have collectives."""
    from .rank_runner import FollowingRunner, LeadingRunner

    if settings.deterministic:
        raise ConfigurationError(
            "--deterministic: sums over several ranks have another order; leave out one of the two"
        )
    device, share = _take_device(settings, share)
    if device.type == "cuda" and ranks.count > (num_gpus := torch.cuda.device_count()):
        has = "MIG instances, which cannot exchange data" if visible_instances() else f"{num_gpus} GPUs"
        raise ConfigurationError(f"--tensor-parallel-size {ranks.count} needs whole GPUs; this machine has {has}")
    if device.type == "cuda" or not ranks.rank:
        _claim_device(settings, device, share)
    ranks.connect(device)
    # Sums over a row of logits depend on the number of threads, and all ranks have to draw the same tokens.
    torch.set_num_threads(ranks.least(torch.get_num_threads()))
    loaded = _load(settings, device, ranks)
    draft = _load_draft(settings, device, loaded) if settings.draft_model and not ranks.rank else None
    expected = self_test.expected_answers(loaded, _kv_dtype(settings))
    make_graphs = partial(_graphs, settings, device, ranks.agree)
    options = _with_step_memory(_options(settings, device, share), loaded, make_graphs())
    options = replace(options, num_state_snapshots=ranks.least(fitting_snapshots(loaded, options)))
    num_blocks = ranks.least(options.num_blocks or fitting_blocks(loaded, options, draft))
    options, graphs = replace(options, num_blocks=num_blocks), make_graphs()
    if ranks.rank:  # which follows rank 0 from here on
        runner: ModelRunner = FollowingRunner(ranks, loaded, options, graphs)
    else:
        runner = LeadingRunner(ranks, loaded, options, draft, graphs)
        if graphs is not None:
            run_largest_steps(runner, graphs.max_batch_size)
        self_test.check(runner, expected, loaded.dtype)
    if settings.preallocate_kv_cache:
        runner.preallocate()
    return runner


def _kv_dtype(settings: WorkerSettings) -> torch.dtype | None:
    return torch.int8 if settings.kv_cache_dtype == "int8" else None


def _options(settings: WorkerSettings, device: torch.device, share: MachineShare) -> RunnerOptions:
    return RunnerOptions(
        num_blocks=settings.num_blocks,
        kv_cache_memory_fraction=settings.kv_cache_memory_fraction,
        num_workers=share.count,
        block_size=settings.block_size,
        kv_prefault_tokens=_PREFAULT_TOKENS,
        swap_memory_bytes=settings.swap_memory_bytes,
        num_slots=settings.max_batch_size,
        max_step_tokens=settings.target_batch_tokens or _MAX_STEP_TOKENS.get(device.type, _MAX_STEP_TOKENS_ELSEWHERE),
        attention_backend=settings.attention_backend,
        kv_dtype=_kv_dtype(settings),
        prompt_lookup_ngrams=(settings.prompt_lookup_max, settings.prompt_lookup_min),
    )


def _with_step_memory(options: RunnerOptions, loaded: LoadedModel, graphs: DecodeGraphs | None) -> RunnerOptions:
    """Return the options with the memory that steps need, where the number of blocks depends on it."""
    if loaded.device.type != "cuda" or options.num_blocks:
        return options
    return replace(options, step_memory_bytes=largest_step_bytes(loaded, options, graphs))


def _graphs(settings: WorkerSettings, device: torch.device, agree: Agree = bool) -> DecodeGraphs | None:
    sizes = graph_batch_sizes(settings) if device.type == "cuda" else []  # collectives of gloo cannot be captured
    return DecodeGraphs(sizes, cuda_capture(device), agree) if sizes else None


def graph_batch_sizes(settings: WorkerSettings) -> list[int]:
    """Return the numbers of rows that decode steps are captured for."""
    if settings.cuda_graph_batch_sizes == "none":
        return []
    if settings.cuda_graph_batch_sizes == "auto":
        most = min(-(-settings.max_batch_size // 8) * 8, _MAX_GRAPH_BATCH_SIZE)
        return [1, 2, 4, *range(8, most + 1, 8)]
    return [int(size) for size in settings.cuda_graph_batch_sizes.split(",")]


def _take_device(settings: WorkerSettings, share: MachineShare) -> tuple[torch.device, MachineShare]:
    """Return the device and this worker's part of it, with cores, threads and kernels chosen for this process."""
    device, share = choose_device(settings.device, share)
    if device.type == "cpu":
        _take_cores(settings.device, share)
    torch.set_num_threads(settings.threads or usable_cores())
    try:
        kernels.choose(settings.cpu_kernels)
    except ValueError as error:
        raise ConfigurationError(f"--cpu-kernels: {error}") from None
    return device, share


def _runner_type(settings: WorkerSettings, loaded: LoadedModel) -> type[ModelRunner]:
    if not settings.deterministic:
        return ModelRunner
    from .deterministic import runner_type  # other workers do without it

    return runner_type(loaded, settings.threads)


def _may_tune_threads(settings: WorkerSettings, loaded: LoadedModel) -> bool:
    """Return whether no setting fixes the threads, and results do not depend on them: those of kernels do not."""
    if settings.threads or loaded.decoder is None or loaded.device.type != "cpu":
        return False
    has_kernels = settings.deterministic or loaded.dtype is not torch.float32 or bool(loaded.weights)
    return has_kernels or usable_cores() <= _MAX_TUNED_FLOAT32_CORES


def _load(settings: WorkerSettings, device: torch.device, ranks: Ranks | None = None) -> LoadedModel:
    divided: Divided | None = None
    agree: Agree = bool
    if ranks is not None:
        from lineclear.worker.model.division import load_divided  # other workers do without it

        divided, agree = partial(load_divided, ranks), ranks.agree

    def load_once() -> LoadedModel:
        return load(settings.model, device, _DTYPES[settings.dtype], settings.max_model_len, divided=divided)

    if settings.quantization != "none":
        return to_quantized(load_once(), settings.quantization)
    if not settings.fused_forward:
        return replace(load_once(), modules_reason="--no-fused-forward is set")
    packer = pack_by_row if settings.deterministic else None
    fused = build_fused(load_once(), packer, agree=agree)
    # A failed comparison leaves a model without matrices.
    return fused or replace(load_once(), modules_reason="the logits of the fused pass differ too much")


def _load_draft(settings: WorkerSettings, device: torch.device, served: LoadedModel) -> LoadedModel:

    def load_once() -> LoadedModel:
        return load(settings.draft_model, device, served.dtype, flag="--draft-model")

    draft = load_once()
    check_vocabulary(served, draft)
    if not settings.fused_forward:
        return draft
    return build_fused(draft) or load_once()


def _take_cores(device: str, share: MachineShare) -> None:
    """Bind this process to the cores that the device names, or to its share of the usable ones."""
    host_info.divide_quota(share.count)
    if cores := named_cores(device):
        bind(cores)
    elif share.count > 1:
        bind(cores_of(share, os.sched_getaffinity(0)))


def _claim_device(settings: WorkerSettings, device: torch.device, share: MachineShare) -> None:
    """Wait until no other worker of the same scheduler holds this worker's part of a GPU, nor the memory of one.

    Of a CPU, log which cores another worker uses too: each slows the other.
    """
    directory = Path(settings.socket_directory)
    if device.type == "cuda":
        with contextlib.suppress(PathError):  # reported when the sockets are made
            private_socket_dir(directory)
        claim_gpu(directory, device, share)
        if device.index is not None:
            torch.cuda.set_device(device)
        free_bytes(device)  # for the weights
    elif taken := claim(directory, os.sched_getaffinity(0)):
        log.warning(
            "device_is_shared",
            shared=taken,
            hint="another worker of this scheduler uses them; give each worker its own by --device or --machine-share",
        )


def choose_device(
    name: str,
    share: MachineShare = MachineShare(),  # noqa: B008 (it is frozen)
) -> tuple[torch.device, MachineShare]:
    """Return the device for a setting, and which part of it this worker takes. Raises ConfigurationError."""
    kind, _, place = name.partition(":")
    of_gpu = keep_instance(place, share) if kind in ("auto", "cuda") else (place, share)
    devices = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if kind == "auto":
        kind = next(kind for kind, available in devices.items() if available)
    if not devices[kind]:
        raise ConfigurationError(f"--device {name}: this machine has no {kind} device that torch can use")
    return choose_gpu(*of_gpu) if kind == "cuda" else (torch.device(kind), share)
