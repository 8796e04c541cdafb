"""What those who come from another server type, and which flag of ours does that."""

from __future__ import annotations

from typing import Final

# Of vLLM, SGLang and text-generation-inference. Only where the meaning is the same, or near enough to be looked up.
FLAG_ALIASES: Final = {
    "--host": "--listen",
    "--hostname": "--listen",
    "--port": "--listen",
    "--model-path": "--model",
    "--model-id": "--model",
    "--max-num-seqs": "--max-batch-size",
    "--max-running-requests": "--max-batch-size",
    "--max-num-batched-tokens": "--target-batch-tokens",
    "--chunked-prefill-size": "--target-batch-tokens",
    "--max-concurrent-requests": "--max-queue-size",
    "--max-queued-requests": "--max-queue-size",
    "--schedule-policy": "--scheduling-policy",
    "--enable-prefix-caching": "--prefix-cache",
    "--ssl-certfile": "--tls-cert-file",
    "--ssl-keyfile": "--tls-key-file",
    "--ssl-ca-certs": "--tls-client-ca-file",
    "--api-key": "--token-file",
}
