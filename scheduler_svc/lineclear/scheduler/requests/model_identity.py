"""Compare the model and the prompt of a request with those of this server."""

from __future__ import annotations

from lineclear.errors import ModelChanged, ModelNotFound
from lineclear.scheduler.requests.adapters import LoadedAdapter
from lineclear.scheduler.requests.validation import ModelBounds, ValidatedRequest
from lineclear.v1 import inference_pb2 as pb


def check_model(
    request: pb.GenerateRequest, validated: ValidatedRequest, bounds: ModelBounds, adapter: LoadedAdapter | None = None
) -> None:
    """Raises ModelNotFound or ModelChanged for a request that requires another model, or one with another adapter."""
    if request.HasField("model") and request.model != bounds.model:
        raise ModelNotFound(f"the served model is {bounds.model}, not the one that `model` names")
    required, served = validated.model_fingerprint, bounds.model_fingerprint
    if adapter is not None:
        served = adapter.fingerprint(served)
    if required and required != served:
        raise ModelChanged(
            f"the served model is {served}, the request requires {required}; the tokens "
            "received so far are of that model; send a new request for an answer of the served one",
            metadata={"model_fingerprint": served, "expected_model_fingerprint": required},
        )


def check_prompt(validated: ValidatedRequest, digest: str) -> None:
    """Raises ModelChanged if the prompt of a resumed answer has other tokens than before."""
    if validated.prompt_digest not in ("", digest):
        raise ModelChanged(
            "the prompt has other tokens on this server than at the start of the answer, so it cannot be resumed here; "
            "send a new request",
            metadata={"prompt_digest": digest, "expected_prompt_digest": validated.prompt_digest},
        )
