"""Names that other inference servers have for the settings of lineclear."""

from __future__ import annotations

from typing import Final

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
}
"""Further names of a setting in flags, environment variables and the configuration file."""

OTHER_SERVERS: Final = {
    "--host": "give --listen HOST:PORT",
    "--hostname": "give --listen HOST:PORT",
    "--port": "give --listen HOST:PORT",
    "--api-key": "write it to a file and give --token-file FILE",
    "--max-concurrent-requests": "--max-batch-size limits running requests, --max-queue-size waiting ones",
    "--generation-config": "give --use-generation-config or --no-use-generation-config",
    "--disable-radix-cache": "give --no-prefix-cache",
    "--gpu-memory-utilization": "the worker has --kv-cache-memory-fraction, a share of the free memory",
    "--mem-fraction-static": "the worker has --kv-cache-memory-fraction, a share of the free memory",
}
"""What to do about flags of vLLM, SGLang and TGI whose quantity has another form here."""


def names_of(setting: str) -> tuple[str, ...]:
    """Return the names of a setting, its own first."""
    return (setting, *ALIASES.get(setting, ()))
