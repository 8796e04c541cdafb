"""What an operator may decide about a worker. A flag beats an environment variable beats the default.

Every field carries its own documentation; flags (`--num-blocks`), variables (`LINECLEAR_WORKER_NUM_BLOCKS`) and the
configuration page are made from it. What is learned later (how many blocks fit) is not here: it travels in Hello.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Device(StrEnum):
    """Where the model runs."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    MPS = "mps"


class Dtype(StrEnum):
    """Number format of weights, activations and the KV cache."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class LogLevel(StrEnum):
    """The least severe event that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class WorkerSettings(BaseSettings):
    """Settings of `lineclear-worker`, fixed for the life of the process."""

    model_config = SettingsConfigDict(
        env_prefix="LINECLEAR_WORKER_",
        frozen=True,
        extra="forbid",
        validate_default=True,
        cli_kebab_case=True,
        cli_prog_name="lineclear-worker",
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    model: Annotated[
        str,
        Field(
            min_length=1,
            description="A directory with config.json and safetensors weights, or the id of a Hugging Face repository"
            " whose files are in the local cache. Nothing is downloaded.",
        ),
    ]
    directory: Annotated[
        Path,
        Field(
            description="The private directory (mode 0700) that holds the sockets shared with the scheduler; the"
            " scheduler makes it."
        ),
    ]
    device: Annotated[
        Device,
        Field(description="Where the model runs: auto takes cuda where there is one, then mps, then cpu."),
    ] = Device.AUTO
    dtype: Annotated[
        Dtype,
        Field(
            description="Number format of weights, activations and KV cache. auto keeps the checkpoint's own, on a GPU"
            " and on a CPU alike; a CPU without bfloat16 instructions is faster with float32."
        ),
    ] = Dtype.AUTO
    attention_backend: Annotated[
        str,
        Field(
            description="Which attention implementation reads the KV pages: auto, torch_paged, or reference (slow and"
            " plain, the one the others are tested against)."
        ),
    ] = "auto"
    block_size_tokens: Annotated[
        int,
        Field(ge=1, le=1024, description="Positions in a KV block, the unit in which memory is given and shared."),
    ] = 16
    num_blocks: Annotated[
        int,
        Field(ge=0, description="KV blocks in the pool. 0 sizes the pool from the memory that is free after loading."),
    ] = 0
    kv_memory_fraction: Annotated[
        float,
        Field(
            ge=0.0,
            lt=1.0,
            description="With num_blocks 0: the share of the free memory that the pool may take. 0 means 0.85 on a GPU"
            " and 0.5 on a CPU, whose memory others use too.",
        ),
    ] = 0.0
    num_slots: Annotated[
        int,
        Field(ge=1, le=4096, description="Sequences that can be in progress at once."),
    ] = 64
    max_model_len: Annotated[
        int,
        Field(ge=0, description="The most positions (prompt and output) of a sequence. 0 takes the model's own limit."),
    ] = 0
    max_step_tokens: Annotated[
        int,
        Field(ge=1, description="The most tokens one step may compute; a plan with more is refused."),
    ] = 2048
    threads: Annotated[
        int,
        Field(ge=0, description="Compute threads on the CPU. 0 leaves the choice to torch (one a physical core)."),
    ] = 0
    log_level: Annotated[LogLevel, Field(description="The least severe event that is logged.")] = LogLevel.INFO


def parse(arguments: Sequence[str]) -> WorkerSettings:
    """Settings from command-line `arguments` and the environment. Prints and exits on --help and on a usage error."""
    return WorkerSettings(_cli_parse_args=list(arguments))  # type: ignore[call-arg]  # the rest comes from the sources
