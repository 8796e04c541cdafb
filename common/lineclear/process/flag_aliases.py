"""Further names of the settings of lineclear: those of other inference servers, and former ones."""

from __future__ import annotations

from typing import Final

from .setting_fields import flag_of

ALIASES: Final[dict[str, tuple[str, ...]]] = {
    "model": ("model_path", "model_id"),  # SGLang, TGI
    "served_model_name": ("alias",),  # llama.cpp
    "max_batch_size": ("max_num_seqs", "max_running_requests", "parallel"),  # vLLM, SGLang, llama.cpp
    "target_batch_tokens": ("max_num_batched_tokens", "chunked_prefill_size"),  # vLLM, SGLang
    "max_queue_size": ("max_num_queued_reqs", "max_queued_requests"),  # vLLM, SGLang
    "scheduling_policy": ("schedule_policy",),  # SGLang
    "prefix_cache": ("enable_prefix_caching",),  # vLLM
    "speculative_method": ("speculative_algorithm",),  # SGLang
    "draft_model": ("speculative_model", "speculative_draft_model_path", "model_draft"),  # vLLM, SGLang, llama.cpp
    "num_speculative_tokens": ("speculative_num_draft_tokens", "draft_max"),  # SGLang, llama.cpp
    "tls_cert_file": ("ssl_certfile", "ssl_cert_file"),  # vLLM and SGLang, llama.cpp
    "tls_key_file": ("ssl_keyfile", "ssl_key_file"),
    "tls_client_ca_file": ("ssl_ca_certs",),
    "block_size": ("page_size",),  # SGLang
    "num_blocks": ("num_gpu_blocks_override",),  # vLLM
    "max_model_len": ("context_length", "max_total_tokens"),  # SGLang, TGI
    "quantization": ("quantize",),  # TGI
    "fused_forward": ("fused_cpu_forward",),  # before GPUs had one
    "tensor_parallel_size": ("tp_size", "tp", "num_shard"),  # SGLang, TGI
}
"""Further names of a setting in flags, environment variables and the configuration file."""

_INSTEAD = {
    "give --listen HOST:PORT": "--host --hostname --port",
    "write it to a file and give --token-file FILE": "--api-key",
    "give --token-file FILE": "--api-key-file",
    "--max-batch-size limits running requests, --max-queue-size waiting ones": "--max-concurrent-requests",
    "give --use-generation-config or --no-use-generation-config": "--generation-config",
    "give --no-prefix-cache": "--disable-radix-cache --no-cache-prompt",
    "it is on; --no-prefix-cache turns it off": "--cache-prompt",
    "the worker has --kv-cache-memory-fraction, a share of the free memory": (
        "--gpu-memory-utilization --mem-fraction-static --cuda-memory-fraction"
    ),
    "the worker has --tensor-parallel-size": "-tp --sharded --tensor-split --split-mode",
    "there is none: --num-workers and --worker-devices start several workers of a model": (
        "--pipeline-parallel-size -pp --pp-size --data-parallel-size -dp --dp-size --dp --expert-parallel-size"
        " --ep-size --enable-expert-parallel"
    ),
    "it is always on": "--enable-chunked-prefill --cont-batching --enable-mixed-chunk",
    "there is none: steps run without CUDA graphs, and nothing is compiled": (
        "--enforce-eager --disable-cuda-graph --cuda-graph-max-bs --cuda-graphs --enable-torch-compile"
    ),
    "there is none: code in a model directory never runs": "--trust-remote-code",
    "there is none: weights stay on the device": "--cpu-offload-gb --n-gpu-layers -ngl",
    "the worker has --swap-memory-bytes, a number of bytes": "--swap-space",
    "there is none: the tokenizer and the chat template in the model directory are used": (
        "--tokenizer --tokenizer-path --tokenizer-mode --chat-template --jinja"
    ),
    "there is none: --max-model-len of the worker limits prompt and output together": (
        "--max-input-length --max-input-tokens"
    ),
    "the worker has --max-model-len, of one request, and --num-blocks for all": "--ctx-size",
    "the worker has --num-blocks times --block-size positions for all requests": "--max-batch-total-tokens",
    "give --target-batch-tokens": "--batch-size --ubatch-size --max-batch-prefill-tokens",
    "the worker has --kv-cache-dtype": "--cache-type-k --cache-type-v",
    "the worker has --threads": "--threads-batch",
    "give --metrics-listen HOST:PORT": "--metrics --enable-metrics --prometheus-port",
    "give --otlp-traces-endpoint http://HOST:PORT": "--enable-trace --otlp-endpoint --collect-detailed-traces",
    "give --admin-listen ADDRESS: `lineclear top` shows the slots there": "--slots",
    "give --log-level LEVEL; requests are logged without their content": (
        "--disable-log-requests --disable-log-stats --log-requests --verbose"
    ),
    "name adapters by --lora-modules NAME=DIR, or give --lora-dir to load them at run time": (
        "--enable-lora --lora --lora-adapters --lora-paths"
    ),
    "give --max-loras": "--max-loras-per-batch",
    "give --speculative-method and --num-speculative-tokens, and --draft-model for a draft model": (
        "--speculative-config"
    ),
    "it is not needed: tool calls are parsed; --tool-call-parser names another format": "--enable-auto-tool-choice",
    "there is none: nothing is downloaded; give --model DIR": (
        "--revision --download-dir --load-format --huggingface-hub-cache"
    ),
    "there is none: a request has its own seed": "--seed --random-seed",
    "there is none: all forms of structured output work without a choice": (
        "--guided-decoding-backend --structured-outputs-config --grammar-backend"
    ),
    "there is none: the service is gRPC, without HTTP": (
        "--cors-allow-origin --allowed-origins --root-path --chat-template-content-format --path"
    ),
    "the worker has --attention-backend": "--flash-attn",
    "the worker has --preallocate-kv-cache for the KV cache": "--mlock --no-mmap",
    "there is none: new requests join at any step; --max-prefill-slowdown protects running ones": (
        "--waiting-served-ratio --max-waiting-tokens --schedule-conservativeness"
    ),
    "give --max-outputs": "--max-best-of",
    "give --default-max-tokens, or max_tokens in a request": "--n-predict",
    "it is not needed: each model answers Embed and Score beside Generate": (
        "--runner --task --is-embedding --embedding"
    ),
    "there is none: prompts are not ranked; Score returns the log-probabilities of texts": "--rerank",
    "give --reasoning-parser": "--reasoning-format",
}
OTHER_SERVERS: Final = {flag: hint for hint, flags in _INSTEAD.items() for flag in flags.split()}
"""What to do about flags of vLLM, SGLang, TGI and llama.cpp whose quantity has another form here, or none."""

WORKER_SETTINGS: Final = (
    *(
        "device",
        "machine_share",
        "tensor_parallel_size",
        "dtype",
        "quantization",
        "attention_backend",
        "kv_cache_dtype",
        "cpu_kernels",
        "cuda_graph_batch_sizes",
    ),
    *("prompt_lookup_max", "prompt_lookup_min", "threads", "block_size", "num_blocks", "kv_cache_memory_fraction"),
    *("max_model_len", "swap_memory_bytes"),
)
"""Settings of the worker alone; the scheduler names them when they are given to it."""
WORKER_SWITCHES: Final = ("deterministic", "fused_forward", "preallocate_kv_cache")


def flags_of_worker() -> dict[str, str]:
    """Return the flags of the worker alone, each with a sentence for a scheduler that was given it."""
    names = [name for setting in (*WORKER_SETTINGS, *WORKER_SWITCHES) for name in names_of(setting)]
    names += [f"no_{name}" for setting in WORKER_SWITCHES for name in names_of(setting)]
    return dict.fromkeys(map(flag_of, names), "it is a flag of the worker, which come after a lone `--`: -- {}")


def names_of(setting: str) -> tuple[str, ...]:
    return (setting, *ALIASES.get(setting, ()))
