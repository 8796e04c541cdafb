"""The worker process's settings: one frozen object, made once at start.

A flag beats an environment variable (LINECLEAR_WORKER_ and the name), which beats the default. Flags, variables and
docs all derive from the fields here. What is learnt later (how many blocks fit, the context length) is not a setting;
the worker says it in its Hello.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from lineclear.process import command_line, settings_base

Device = Literal["auto", "cpu", "cuda", "mps"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8"]
KvCacheDtype = Literal["auto", "int8"]
AttentionBackendName = Literal["auto", "torch_paged", "reference", "native"]


MODEL = settings_base.Group("Model")
SOCKETS = settings_base.Group("Sockets")
COMPUTATION = settings_base.Group("Computation")
MEMORY = settings_base.Group("Memory and limits")
STOPPING = settings_base.Group("Stopping")
LOGS = settings_base.Group("Logs")


class ConfigurationError(Exception):
    """The process cannot start as configured; the message says what to change."""


class WorkerSettings(BaseSettings):
    """Settings of lineclear-worker."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix="LINECLEAR_WORKER_",
        cli_prog_name="lineclear-worker",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_exit_on_error=False,
        cli_avoid_json=True,
        cli_hide_none_type=True,
    )

    model: str = MODEL.field(
        min_length=1,
        brief="Directory with config.json and safetensors weights.",
        description="Directory with config.json and safetensors weights, or the id of a Hugging Face repository whose"
        " files are in the local cache. Nothing is downloaded.",
    )
    socket_directory: str = SOCKETS.field(
        min_length=1,
        brief="Private directory of the sockets to the scheduler.",
        description="Private directory (mode 0700, ours) of the sockets to the scheduler.",
    )

    # --- where and how to compute ---
    device: Device = COMPUTATION.field(
        "auto", description="Where the model runs. auto: cuda if there is one, then mps, then cpu."
    )
    dtype: Dtype = COMPUTATION.field(
        "auto",
        description="Number format of weights, activations and KV cache. auto is the checkpoint's own, on a GPU and on"
        " a CPU alike; a CPU without bfloat16 instructions is faster with float32.",
    )
    quantization: Quantization = COMPUTATION.field(
        "none",
        brief="Number format of the weight matrices.",
        description="Number format of the weight matrices. none: dtype. int8: quantised while loading, a scale for each"
        " output channel, activations by rows; on a CPU only, for models built like Llama. Faster, not quite the same.",
    )
    attention_backend: AttentionBackendName = COMPUTATION.field(
        "auto",
        brief="Implementation of attention over KV pages.",
        description="Implementation of attention over KV pages. reference is slow, for comparison.",
    )
    kv_cache_dtype: KvCacheDtype = COMPUTATION.field(
        "auto",
        description="Number format of the KV cache. auto: dtype. int8: a scale for each token and head, almost twice"
        " the blocks in the same memory; on a CPU with the native attention backend only.",
    )
    fused_cpu_forward: bool = COMPUTATION.field(
        True,
        brief="On CPUs, use a forward pass of few operations.",
        description="On CPUs, run models built like Llama through a forward pass of few operations.",
    )
    cpu_kernels: str = COMPUTATION.field(
        "auto",
        brief="C++ kernels for CPUs: auto, none or a name.",
        description="C++ kernels for CPUs. auto: the best that were built and that this processor can run. none: torch"
        " computes the same, slower. Or one by name, as x86_64_avx2; the log line model_loaded has the name.",
    )
    threads: int = COMPUTATION.field(
        0,
        ge=0,
        le=1024,
        brief="Compute threads on the CPU; 0: chosen while serving.",
        description="Compute threads on the CPU. 0: as many for each step as were fastest lately, at most one for each"
        " usable core.",
    )

    # --- how much ---
    block_size: int = MEMORY.field(
        16,
        ge=1,
        le=1024,
        brief="Positions in a KV block.",
        description="Positions in a KV block, the unit in which the cache is given out and shared.",
    )
    num_blocks: int = MEMORY.field(
        0,
        ge=0,
        le=2**31 - 2,
        brief="KV blocks; 0: as many as fit in kv_cache_memory_fraction.",
        description="KV blocks. 0: as many as fit in kv_cache_memory_fraction of the free memory.",
    )
    kv_cache_memory_fraction: float = MEMORY.field(
        0.0,
        ge=0,
        lt=1,
        brief="Share of free memory for the KV cache; 0: automatic.",
        description="Share of the memory free after loading that the KV cache may take, when num_blocks is 0."
        " 0: 0.85 on a GPU, 0.5 on a CPU, whose memory others use too.",
    )
    preallocate_kv_cache: bool = MEMORY.field(
        False,
        brief="Take all memory of the KV cache at start.",
        description="On a CPU, have the system give all memory of the KV cache before the first request, instead of as"
        " it is first used: no step waits for it. Refused at start where there is less.",
    )
    kv_prefault_tokens: int = MEMORY.field(
        16384,
        ge=0,
        le=2**31 - 2,
        brief="Positions whose memory is taken ahead of their use.",
        description="On a CPU, positions whose KV memory the system is asked for ahead of its first use, while no step"
        " has come for 50 ms: no later one waits for it. At most 1/32 of the free memory. 0: none.",
    )
    max_batch_size: int = MEMORY.field(64, ge=1, le=4096, description="Most sequences in progress at once.")
    max_model_len: int = MEMORY.field(
        0,
        ge=0,
        le=2**24,
        brief="Most positions of a sequence; 0: the model's limit.",
        description="Most positions of a sequence, prompt and output together. 0: the model's limit.",
    )
    target_batch_tokens: int = MEMORY.field(
        0,
        ge=0,
        le=2**20,
        brief="Most tokens in one step; 0: 256 on a CPU, 2048 on a GPU.",
        description="Most tokens computed in one step. 0: 256 on a CPU, 2048 on a GPU.",
    )

    # --- leaving ---
    drain_timeout_seconds: float = STOPPING.field(
        30.0,
        ge=0,
        le=7 * 86_400,
        brief="A joined worker serves on for this long after SIGTERM.",
        description="After SIGTERM, a worker that is joined runs the requests of its scheduler for this long, or until"
        " none is left. Longer than the scheduler's drain_timeout_seconds, so that both may be stopped in any order.",
    )

    # --- logs ---
    log_level: Literal["debug", "info", "warning", "error"] = LOGS.field(
        "info", description="Least severe level logged."
    )
    log_format: Literal["auto", "json", "console"] = LOGS.field(
        "auto",
        brief="One JSON object a line, or text for people.",
        description="One JSON object a line, or text for people; auto: text when standard error is a terminal.",
    )


def load(argv: Sequence[str]) -> WorkerSettings:
    """The settings from flags and environment.

    Raises ConfigurationError with one line for each thing that is wrong; SystemExit(0) after --help and --version.
    """
    command_line.print_version("lineclear-worker", argv)
    settings_base.answer_help(WorkerSettings, argv)
    arguments: dict[str, Any] = {"_cli_parse_args": list(argv)}
    try:
        return WorkerSettings(**arguments)
    except ValidationError as error:
        raise ConfigurationError("\n".join(map(sources(argv).problem, error.errors()))) from None
    except SettingsError as error:
        known = command_line.flag_names(WorkerSettings.model_fields)
        unreadable = sources(argv).unreadable(str(error))
        raise ConfigurationError(
            unreadable or command_line.unknown_flag_errors(str(error), known, otherwise="--help lists them")
        ) from None


def sources(argv: Sequence[str]) -> settings_base.Sources:
    """Return where the settings of this command line come from."""
    return settings_base.Sources(WorkerSettings, argv, os.environ)
