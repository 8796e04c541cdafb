"""Settings of the worker process. Flags, environment variables and docs/configuration.md derive from these fields.

The worker reports what it finds out later, such as the number of blocks and the context length, in its Hello.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from lineclear.process import settings_base
from lineclear.process.command_line import Hints
from lineclear.process.device_names import check_device
from lineclear.process.setting_fields import Group
from lineclear.worker.device.machine_share import MachineShare

AttentionBackendName = Literal["auto", "torch_paged", "triton_paged", "flash", "reference", "native"]

MODEL = Group("Model")
SOCKETS = Group("Sockets")
COMPUTATION = Group("Computation")
MEMORY = Group("Memory and limits")
STOPPING = Group("Stopping")
LOGS = Group("Logs")


class WorkerSettings(settings_base.ProcessSettings):
    """Settings of lineclear-worker."""

    model_config = SettingsConfigDict(env_prefix="LINECLEAR_WORKER_")
    program: ClassVar[str] = "lineclear-worker"

    model: str = MODEL.field(min_length=1)
    """Directory of a model, or a GGUF file. A directory has config.json and safetensors weights. The id of a Hugging
    Face repository in the local cache will do; nothing is downloaded."""
    socket_directory: str = SOCKETS.field(min_length=1)
    """Private directory of the sockets to the scheduler. It has mode 0700 and belongs to the user of both processes."""

    device: str = COMPUTATION.field("auto")
    """Device of the model: auto, cpu, cuda or mps. auto: cuda if available, else mps, else cpu. cuda:1 is the second
    GPU or MIG instance of CUDA_VISIBLE_DEVICES; cuda:GPU-... and cuda:MIG-... are UUIDs of nvidia-smi -L. cpu:0-3 runs
    on these cores only, and its memory then lies on their NUMA node."""
    machine_share: str = COMPUTATION.field("0/1")
    """Part of the machine that this worker uses, as INDEX/COUNT. Without a GPU or cores in device, worker 1/2 takes
    the second GPU, or the second half of the NUMA nodes or cores. Workers of one device divide its memory: with a GPU
    in device, 1/2 is half of that one. The scheduler sets it for the workers that it starts."""
    tensor_parallel_size: int = COMPUTATION.field(1, ge=1, le=64)
    """Devices that a model is divided over. Each has a process and a part of every layer, on consecutive GPUs, or on
    equal parts of the cores; the exit of one is the exit of the worker."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = COMPUTATION.field("auto")
    """Number format of weights, activations and KV cache. auto: that of the checkpoint; on a CPU,
    bfloat16 for float16."""
    quantization: Literal["none", "int8", "int4"] = COMPUTATION.field("none")
    """Quantization of the weight matrices while loading. int8: with a scale for each output channel. int4: for each 64
    inputs of a channel, and int8 in the output layer. Activations become int8 too. On a CPU only, for the fused
    families of docs/supported.md. It is faster and less exact."""
    attention_backend: AttentionBackendName = COMPUTATION.field("auto")
    """Implementation of paged attention. reference is slow and serves as a comparison."""
    deterministic: bool = COMPUTATION.field(False)
    """Answer a request bit for bit the same in any batch. On a CPU: tokens and log-probabilities. Without the fused
    forward pass one token is computed at a time, which is slow; docs/deterministic.md."""
    cuda_graph_batch_sizes: str = COMPUTATION.field("auto")
    """Batch sizes of CUDA graphs, as 1,2,8, or auto or none. Decode steps run as the next larger graph.
    auto: 1, 2, 4 and multiples of 8 up to max_batch_size, at most 256."""
    kv_cache_dtype: Literal["auto", "int8"] = COMPUTATION.field("auto")
    """Number format of the KV cache. auto: dtype. int8: with a scale for each token and head, almost twice the blocks
    in the same memory. On a CPU with the native attention backend only."""
    fused_forward: bool = COMPUTATION.field(True)
    """Use the fused forward pass. It runs the families of docs/supported.md in few operations, on CPUs with kernels and
    on GPUs with Triton."""
    cpu_kernels: str = COMPUTATION.field("auto")
    """C++ kernels for CPUs: auto, none or a name. auto: the fastest that were built and that this processor runs. none:
    torch, slower. A name as x86_64_avx2 is in the log line model_loaded."""
    draft_model: str = COMPUTATION.field("")
    """Directory of a draft model, for speculative decoding. It has the same tokenizer and far fewer weights, and
    replaces prompt lookup. Empty: none."""
    prompt_lookup_max: int = COMPUTATION.field(4, ge=1, le=32)
    """Longest n-gram that prompt lookup searches. It searches the last tokens earlier in prompt and answer."""
    prompt_lookup_min: int = COMPUTATION.field(2, ge=1, le=32)
    """Shortest n-gram that prompt lookup searches. Shorter ones draft nothing."""
    threads: int = COMPUTATION.field(0, ge=0, le=1024)
    """Compute threads on the CPU; 0: chosen while serving. Chosen: the fastest count of recent steps, at most one
    thread for each usable core."""

    block_size: int = MEMORY.field(16, ge=1, le=1024)
    """Token positions in a KV block. Blocks are the unit of allocation and of prefix sharing."""
    num_blocks: int = MEMORY.field(0, ge=0, le=2**31 - 2)
    """KV blocks; 0: as many as fit in kv_cache_memory_fraction."""
    kv_cache_memory_fraction: float = MEMORY.field(0.0, ge=0, lt=1)
    """Share of free memory for the KV cache; 0: automatic. It is a share of the memory free after loading and holds if
    num_blocks is 0. On a GPU the share includes what the largest step takes, which is measured at the start. Automatic:
    0.9 on a GPU, 0.5 on a CPU, whose memory other programs use too."""
    preallocate_kv_cache: bool = MEMORY.field(False)
    """Allocate all memory of the KV cache at start. On a CPU, no step then waits for memory. The worker does not start
    if there is too little."""
    swap_memory_bytes: int = MEMORY.field(0, ge=0, le=2**40)
    """Bytes of host memory for preempted requests; 0: none. Their KV blocks are copied there and back if that takes
    less time than computing them again. On a GPU the memory is pinned. Each worker takes as much."""
    max_batch_size: int = MEMORY.field(64, ge=1, le=4096)
    """Most requests in one step (slots)."""
    max_model_len: int = MEMORY.field(0, ge=0, le=2**24)
    """Most tokens of prompt and output; 0: the model's limit."""
    target_batch_tokens: int = MEMORY.field(0, ge=0, le=2**20)
    """Most tokens in one step; 0: 256 on a CPU, 2048 on a GPU."""

    drain_timeout_seconds: float = STOPPING.field(30.0, ge=0, le=7 * 86_400)
    """Running requests may finish for this long after SIGTERM. A value above the scheduler's drain_timeout_seconds lets
    both processes be stopped in any order."""

    log_level: Literal["debug", "info", "warning", "error"] = LOGS.field("info")
    """Least severe level logged."""
    log_format: Literal["auto", "json", "console"] = LOGS.field("auto")
    """One JSON object a line, or text. auto: text if standard error is a terminal."""

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, value: str) -> str:
        return check_device(value)

    @model_validator(mode="after")
    def _ngrams_have_an_order(self) -> WorkerSettings:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"--prompt-lookup-min ({self.prompt_lookup_min}) is larger than --prompt-lookup-max"
                f" ({self.prompt_lookup_max})"
            )
        return self

    @model_validator(mode="after")
    def _can_divide(self) -> WorkerSettings:
        if self.tensor_parallel_size > 1 and self.quantization != "none":
            raise ValueError(
                f"--quantization {self.quantization} is not possible with --tensor-parallel-size: give one of them"
            )
        if self.tensor_parallel_size > 1 and self.device == "mps":
            raise ValueError("--tensor-parallel-size above 1 needs GPUs of NVIDIA, or --device cpu")
        if self.tensor_parallel_size > 1 and self.device.startswith(("cuda:GPU-", "cuda:MIG-")):
            raise ValueError(
                f"--tensor-parallel-size {self.tensor_parallel_size} needs several GPUs, --device {self.device} is one;"
                " give the number of the first as cuda:0, or list whole GPUs in CUDA_VISIBLE_DEVICES"
            )
        return self

    @field_validator("cuda_graph_batch_sizes")
    @classmethod
    def _are_batch_sizes(cls, value: str) -> str:
        if value not in ("auto", "none") and not all(x.strip().isdecimal() and int(x) > 0 for x in value.split(",")):
            raise ValueError(f"{value!r} is neither auto, none nor numbers of requests as 1,2,4,8")
        return value

    @field_validator("machine_share")
    @classmethod
    def _is_a_share(cls, value: str) -> str:
        MachineShare.parse(value)
        return value


def load(argv: Sequence[str]) -> WorkerSettings:
    """Return the settings from flags and environment. Raises as settings_base.load."""
    hints = Hints("--help lists them, and those of the scheduler come before the lone `--`")
    return settings_base.load(WorkerSettings, argv, hints)
