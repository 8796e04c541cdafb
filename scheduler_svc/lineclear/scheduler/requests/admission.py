"""Admit requests: validate them, reserve a place in the queue, and open their output.

Small requests are validated before the quota check, large ones after it, so that a full queue costs little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar

from google.protobuf.message import Message

from lineclear.errors import DuplicateRequest, ModelChanged, ModelNotFound, RequestTooLarge
from lineclear.scheduler.requests.adapters import AdapterUse, LoadedAdapter
from lineclear.scheduler.requests.answer.answer import Answer, BestOf
from lineclear.scheduler.requests.answer.beams import Beams
from lineclear.scheduler.requests.fairness import FairnessWindow
from lineclear.scheduler.requests.loop_pacer import SMALL_BYTES
from lineclear.scheduler.requests.request_context import RequestContext
from lineclear.scheduler.requests.request_metrics import EndedRequest
from lineclear.scheduler.requests.services import Call, RequestServices
from lineclear.scheduler.requests.tenant_limits import QueuePlace
from lineclear.scheduler.requests.validate import request as validation
from lineclear.scheduler.requests.validate.request import ModelBounds, ValidatedRequest
from lineclear.scheduler.security.identity import Identity
from lineclear.v1 import inference_pb2 as pb

_has_request: ContextVar[bool] = ContextVar("has_request", default=False)


def note_request() -> None:
    """Note that the call of this task has a request, whose end is counted: an error of the call is not."""
    _has_request.set(True)


class Admission:
    """Admits requests, and finds live ones by caller and request_id. On one event loop."""

    def __init__(self, services: RequestServices) -> None:
        self.services = services
        self._max_request_bytes = services.settings.max_request_bytes
        self._live: dict[tuple[Identity, str], RequestContext] = {}
        weights = services.settings.weights
        self.fairness = FairnessWindow(services.quota.tenants, self._live.values, weights, services.clock)
        """How equally tenants are served."""
        self.on_ended: Callable[[RequestContext, EndedRequest], None] | None = None
        """Called with each request that has ended."""

    def __len__(self) -> int:
        """Return the number of live requests."""
        return len(self._live)

    def __iter__(self) -> Iterator[RequestContext]:
        """Iterate over a copy of the live requests, so that the caller may close them."""
        return iter(list(self._live.values()))

    def admit(self, message: pb.GenerateRequest, call: Call) -> RequestContext:
        """Admit a request. Raises why it is rejected."""
        services, bounds, num_bytes = self.services, call.bounds, message.ByteSize()
        if num_bytes > self._max_request_bytes:
            raise _too_large(num_bytes, self._max_request_bytes)
        validated = validation.check(message, bounds) if num_bytes <= SMALL_BYTES else None
        place, adapter = services.quota.reserve(call.tenant), None
        try:
            if validated is None:
                with services.pacer.measured():
                    validated = validation.check(message, bounds)
            if message.HasField("adapter"):
                adapter = services.adapters.acquire(message.adapter)
            _check_model(message, validated, bounds, adapter)
            request = self._open(validated, call, place, adapter)
        except BaseException:
            if adapter is not None:
                services.adapters.release(adapter)
            place.release(started=False)
            raise
        note_request()
        return request

    async def pace(self, message: Message) -> float:
        """Wait until a large request may be validated. Return its arrival. Await it first, and right before `admit`."""
        arrival = self.services.clock()
        if message.ByteSize() > SMALL_BYTES:
            await self.services.pacer.wait()
        return arrival

    def cancel(self, caller: Identity, request_id: str, index: int | None = None) -> bool:
        """Cancel a live request of `caller`, or one output of it. Return False if id or index are unknown."""
        request = self._live.get((caller, request_id))
        if request is None:
            return False
        if index is not None:
            return request.cancel_output(index)
        request.cancel()
        return True

    def count_error(self, reason: str) -> None:
        """Count the error of this task's call, unless it has had a request: the end of that is counted."""
        if not _has_request.get():
            self.services.stats.add_rejected(reason)

    def adapter_use(self) -> AdapterUse:
        """Return the use of adapters by the live requests."""
        running, waiting = (
            {r.adapter.name for r in self if r.adapter is not None and r.has_started == has_started}
            for has_started in (True, False)
        )
        return AdapterUse(self.services.settings.max_loras, tuple(sorted(running)), tuple(sorted(waiting)))

    def _open(
        self, validated: ValidatedRequest, call: Call, place: QueuePlace, adapter: LoadedAdapter | None
    ) -> RequestContext:
        services, key = self.services, (call.caller, validated.request_id)
        if key in self._live:
            raise DuplicateRequest("a request with this request_id is in progress")
        seconds = services.settings.default_deadline_seconds if call.seconds is None else call.seconds
        seconds = min(seconds, services.settings.max_deadline_seconds)
        kind = Answer if not validated.num_held else BestOf if validated.beams is None else Beams
        answer = kind.open(services, validated, place)
        deadline = call.arrival + seconds
        request = RequestContext(services, validated, call, answer, place, deadline, adapter, self._on_close)
        self._live[key] = request
        self.fairness.start()
        return request

    def _on_close(self, request: RequestContext, ended: EndedRequest) -> None:
        del self._live[request.call.caller, request.request_id]
        self.fairness.ended(request)
        if request.adapter is not None:
            self.services.adapters.release(request.adapter)
        if self.on_ended is not None:
            self.on_ended(request, ended)


def _check_model(
    message: pb.GenerateRequest, validated: ValidatedRequest, bounds: ModelBounds, adapter: LoadedAdapter | None
) -> None:
    """Raises ModelNotFound or ModelChanged for a request that requires another model, or one with another adapter."""
    if message.HasField("model") and message.model != bounds.model:
        raise ModelNotFound(f"the served model is {bounds.model}, not the one that `model` names")
    required, served = validated.fields["model_fingerprint"], bounds.model_fingerprint
    if adapter is not None:
        served = adapter.fingerprint(served)
    if required and required != served:
        raise ModelChanged(
            f"the served model is {served}, the request requires {required}; the tokens "
            "received so far are of that model; send a new request for an answer of the served one",
            metadata={"model_fingerprint": served, "expected_model_fingerprint": required},
        )


def _too_large(num_bytes: int, limit: int) -> RequestTooLarge:
    return RequestTooLarge(
        f"the request has {num_bytes} bytes, the limit is {limit}; send less, or have the server raise "
        "--max-message-bytes",
        metadata={"request_bytes": str(num_bytes), "limit": str(limit)},
    )
