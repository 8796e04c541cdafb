"""lineclear.v1.InferenceService: map calls to requests, and output to responses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from google.protobuf.message import Message

from lineclear.errors import ServerDraining, Unauthenticated, UnknownRequest
from lineclear.scheduler.grpc_api.response_writer import ResponseWriter
from lineclear.scheduler.requests import prompt_requests, status_messages
from lineclear.scheduler.requests.admission import note_request
from lineclear.scheduler.requests.loop_pacer import SMALL_BYTES
from lineclear.scheduler.requests.request_manager import RequestManager
from lineclear.scheduler.requests.responses import read_answer
from lineclear.scheduler.requests.services import Call
from lineclear.scheduler.requests.session import Session, session_headers
from lineclear.scheduler.requests.validate import request as validation
from lineclear.scheduler.security import identity
from lineclear.scheduler.security.identity import Context, Identity
from lineclear.status_codec import to_status
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import inference_pb2_grpc

NAME: str = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
_BYTES_PER_TOKEN = 8  # bounds Detokenize by max_prompt_bytes, also without a worker
_SLICE_TOKENS = 16_384  # of a response of Tokenize: converted in 0.3 ms
_NEVER_SECONDS = 10 * 365 * 86_400.0


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """The handlers. On one event loop."""

    def __init__(self, manager: RequestManager) -> None:
        self._manager = manager
        self._services = manager.services
        self._requests = manager.requests
        self._submitted = manager.submitted

    async def Generate(  # type: ignore[override]  # writes to the context instead of returning an iterator
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        """Stream the answer to one request. A hang-up cancels it."""
        async with self.writer(context) as writer:
            await self.answer(request, context, writer.write)

    async def answer(
        self, request: pb.GenerateRequest, context: Context, write: Callable[[pb.GenerateResponse], Awaitable[None]]
    ) -> None:
        """Write the responses to one request. Raises its error."""
        with self._requests.admit(request, await self._call(request, context)) as live:
            await live.submit(request)
            while not live.is_closed:
                await live.wait()
                for response, _, error in read_answer(live):
                    if error is not None:
                        raise error
                    await write(response)

    async def Session(  # type: ignore[override]  # writes to the context instead of returning an iterator
        self, orders: AsyncIterator[pb.SessionRequest], context: Context
    ) -> None:
        """Process the commands of one client and stream the output of all its requests, until it closes its side."""
        remaining = context.time_remaining()
        deadline = None if remaining is None else self._services.clock() + remaining
        caller, tenant = _identify(context)  # inherited by the tasks of the session
        session = Session(self._requests, caller, tenant, _access_check(context), deadline)
        writer = self.writer(context)
        # Clients wait for the headers before they send commands.
        await writer.send_headers(session_headers(self._services.settings.max_request_bytes))
        if (rejection := self._services.model.rejection()) is not None:
            session.drain(rejection)
        self._manager.sessions.add(session)
        reader = asyncio.ensure_future(session.run(orders))
        age_timer = _drain_at_age(session, self._services.settings.max_connection_age_seconds)
        try:
            while (message := await session.next_response()) is not None:
                await writer.write(message)
        finally:
            self._manager.sessions.discard(session)
            reader.cancel()
            age_timer.cancel()
            session.close()

    async def Submit(self, request: pb.SubmitRequest, context: Context) -> pb.SubmitResponse:
        """Start a request whose answer is kept for Attach and GetResult."""
        seconds = validation.seconds(request.timeout, "timeout") if request.HasField("timeout") else None
        call = (await self._call(request.request, context))._replace(seconds=seconds)
        self._submitted.check_unused(call.caller, request.request.request_id)  # no await between this and `admit`
        with self._requests.admit(request.request, call) as live:
            admission = live.outputs[0].admission()
            await live.submit(request.request)
            answer = self._submitted.add(live)
        await admission
        if answer.error is not None and not answer.has_started:
            self._submitted.remove(answer)
            raise answer.error
        return pb.SubmitResponse(request_id=live.request_id, queued=answer.queued)

    async def Attach(  # type: ignore[override]  # writes to the context instead of returning an iterator
        self, request: pb.AttachRequest, context: Context
    ) -> None:
        """Stream an answer from an index on."""
        answer = self._submitted.find(identity.caller(context), request.request_id)
        messages = answer.read(request.from_index, *request.more_from_indexes)
        note_request()
        async with self.writer(context) as writer:
            async for message in messages:
                await writer.write(pb.AttachResponse(response=message))

    async def GetResult(self, request: pb.GetResultRequest, context: Context) -> pb.GetResultResponse:
        """Return the answer so far."""
        answer = self._submitted.find(identity.caller(context), request.request_id)
        error = None if answer.error is None else to_status(answer.error)
        first, *others = answer.outputs
        return pb.GetResultResponse(
            state=answer.state, response=first.whole(), error=error, more_outputs=[output.whole() for output in others]
        )

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        """Cancel a live request of this caller, or remove its ended answer. An unknown one is no error."""
        caller = identity.caller(context)
        with contextlib.suppress(UnknownRequest):
            answer = self._submitted.find(caller, request.request_id)
            if answer.has_ended and not request.HasField("index"):
                self._submitted.remove(answer)
                return pb.CancelResponse(found=True)
        index = request.index if request.HasField("index") else None
        return pb.CancelResponse(found=self._requests.cancel(caller, request.request_id, index))

    async def _call(self, message: Message, context: Context) -> Call:
        """Return the call of a request once the request may be validated. Admit it at once."""
        # Read once: gRPC computes it from the wall clock, which may jump.
        remaining = context.time_remaining()
        caller, tenant = _identify(context)
        arrival = await self._requests.pace(message)
        return Call(self._services.model.require(), caller, tenant, arrival, remaining)

    def writer(self, context: Context) -> ResponseWriter:
        return ResponseWriter(context, self._services.settings.stall_timeout_seconds)

    async def Score(  # type: ignore[override]  # returns the encoded response
        self, request: pb.ScoreRequest, context: Context
    ) -> bytes:
        """Return the log-probabilities of continuations of a prompt. A hang-up cancels their requests."""
        call = await self._call(request, context)
        return await prompt_requests.score(request, self._requests, call)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Return the vectors of inputs. A hang-up cancels their requests."""
        call = await self._call(request, context)
        return await prompt_requests.embed(request, self._requests, call)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Return the token ids of a text or a conversation, as Generate computes them."""
        if request.ByteSize() > SMALL_BYTES:
            await self._services.pacer.wait()
        with self._services.pacer.measured():
            validation.check_tokenize(request, self._services.settings)
        _identify(context)
        if request.WhichOneof("input") == "chat":
            ids = await self._services.tokenizers.encode_chat(request.chat)
        else:
            ids = await self._services.tokenizers.encode(request.text)
        response = pb.TokenizeResponse()
        for start in range(0, len(ids), _SLICE_TOKENS):
            response.token_ids.extend(ids[start : start + _SLICE_TOKENS])
            if start + _SLICE_TOKENS < len(ids):
                await asyncio.sleep(0)  # streams are served in between
        return response

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Return the text of tokens, as Generate sends it."""
        services = self._services
        bounds, limit = services.model.bounds(), services.settings.max_prompt_bytes // _BYTES_PER_TOKEN
        vocab_size = services.tokenizers.tokenizer.vocab_size if bounds is None else bounds.vocab_size
        validation.check_detokenize(request, limit if bounds is None else max(limit, bounds.context_length))
        _identify(context)
        text = await services.tokenizers.decode(
            request.token_ids, keep_special=request.keep_special_tokens, vocab_size=vocab_size
        )
        return pb.DetokenizeResponse(text=text)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """Describe the served model. Fails before the first worker has joined."""
        return self._manager.describe_model()

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        """Return counters and gauges; for one tenant of several, without figures about the other tenants."""
        stats = await self._manager.status()
        sees_all = self._services.settings.admin_listen or self._services.settings.share_stats_across_tenants
        return (
            stats if sees_all or identity.caller(context) == identity.ANONYMOUS else status_messages.for_tenant(stats)
        )


def _identify(context: Context) -> tuple[Identity, str]:
    """Return caller and tenant of this task's call, and count its work for the tenant."""
    caller = identity.caller(context)
    tenant = identity.tenant(caller, context)
    identity.set_flow(tenant, context)
    return caller, tenant


def _access_check(context: Context) -> Callable[[], None]:
    """Return a function that raises Unauthenticated once the credentials of this Session are no longer valid."""
    is_valid, is_in_time = identity.validity(), identity.certificate_validity(context)

    def check() -> None:
        if not is_valid():
            raise Unauthenticated("the token of this Session is no longer valid")
        if not is_in_time():
            raise Unauthenticated("the client certificate of this Session has expired")

    return check


def _drain_at_age(session: Session, seconds: float) -> asyncio.Handle:
    """Drain a session when it reaches the maximum age of a connection; 0: never."""
    error = ServerDraining(
        "the Session has reached its maximum age (--max-connection-age-seconds); open another one",
        retry_after_seconds=0.0,
    )
    return asyncio.get_running_loop().call_later(seconds or _NEVER_SECONDS, session.drain, error)
