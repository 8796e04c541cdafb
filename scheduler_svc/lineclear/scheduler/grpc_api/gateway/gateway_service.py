"""vllm.grpc.engine.VllmEngine: what OpenAI-compatible gateways call, served by the handlers of lineclear's own API.

The protocol comes from the package smg-grpc-proto, an extra of lineclear's: nothing imports this package without
`--gateway-listen`.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc.aio
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from lineclear.errors import Cancelled, ServerStarting, Unsupported
from lineclear.scheduler.grpc_api.error_interceptor import abort
from lineclear.scheduler.grpc_api.inference_service import InferenceService
from lineclear.scheduler.requests import status_messages
from lineclear.scheduler.requests.request_manager import RequestManager
from lineclear.scheduler.security import identity
from lineclear.scheduler.security.identity import Context
from lineclear.v1 import inference_pb2 as pb

from .prefix_feed import PrefixFeed
from .translation import AnswerTranslation, to_lineclear

NAME: str = vllm.DESCRIPTOR.services_by_name["VllmEngine"].full_name

_CHUNK_BYTES = 64 * 1024
_EVENT_SECONDS = 0.25
_REST_FACTOR = 9  # the subscribers together take a tenth of a core


class GatewayService(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # the package has no types
    """The handlers. On the event loop of the other services."""

    def __init__(self, manager: RequestManager, service: InferenceService) -> None:
        self._manager, self._service, self._model = manager, service, manager.services.directory
        self._archive: asyncio.Future[bytes] | None = None
        self._looking, self._rest_seconds = asyncio.Lock(), 0.0

    async def Generate(self, request: vllm.GenerateRequest, context: Context) -> None:
        """Stream the answer to one request, or send it whole. A hang-up or Abort cancels it."""
        translation = AnswerTranslation(request)
        message = to_lineclear(request)
        async with self._service.writer(context) as writer:

            async def write(response: pb.GenerateResponse) -> None:
                for translated in translation.add(response):
                    await writer.write(translated)

            try:
                await self._service.answer(message, context, write)
            except Cancelled:  # by Abort, whose caller reads on
                for translated in translation.abort():
                    await writer.write(translated)

    async def Embed(self, request: vllm.EmbedRequest, context: Context) -> vllm.EmbedResponse:
        message = pb.EmbedRequest()
        message.inputs.add().token_ids.ids.extend(request.tokenized.input_ids)
        answer = await self._service.Embed(message, context)
        values = answer.embeddings[0].values
        return vllm.EmbedResponse(embedding=values, prompt_tokens=answer.prompt_tokens, embedding_dim=len(values))

    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        """Cancel live requests of this caller. Unknown ones are no error."""
        caller = identity.caller(context)
        for request_id in request.request_ids:
            self._manager.requests.cancel(caller, request_id)
        return vllm.AbortResponse()

    async def HealthCheck(self, request: vllm.HealthCheckRequest, context: Context) -> vllm.HealthCheckResponse:
        """Return whether new requests are accepted, also while a lost worker is replaced.

        Ends with ServerStarting before the first worker has joined: a gateway that gets an answer asks for the model.
        """
        model = self._manager.services.model
        if (rejection := model.rejection()) is not None:
            return vllm.HealthCheckResponse(healthy=False, message=str(rejection))
        try:
            model.require()
        except ServerStarting as error:
            await abort(context, error)  # does not count as a rejected request
            return vllm.HealthCheckResponse(healthy=False)
        return vllm.HealthCheckResponse(healthy=True)

    async def GetModelInfo(self, request: vllm.GetModelInfoRequest, context: Context) -> vllm.GetModelInfoResponse:
        model, config = self._manager.describe_model(), _read_json(self._model / "config.json")
        defaults = self._manager.services.model.require().defaults
        return vllm.GetModelInfoResponse(
            model_path=str(self._model),
            tokenizer_path=str(self._model),
            is_generation=True,
            max_context_length=model.context_length,
            max_req_input_len=model.context_length - 1,
            vocab_size=model.vocab_size,
            served_model_name=model.model_id,
            model_type=str(config.get("model_type", "")),
            architectures=[str(name) for name in config.get("architectures") or ()],
            eos_token_ids=model.eos_token_ids,
            pad_token_id=_id(config, "pad_token_id"),
            bos_token_id=_id(config, "bos_token_id"),
            default_sampling_params_json=json.dumps(dict(defaults)) if defaults else "",
        )

    async def GetServerInfo(self, request: vllm.GetServerInfoRequest, context: Context) -> vllm.GetServerInfoResponse:
        model, stats = self._manager.describe_model(), await self._manager.status()
        return vllm.GetServerInfoResponse(
            active_requests=stats.gauges.num_requests_running + stats.gauges.num_requests_waiting,
            uptime_seconds=stats.uptime.ToTimedelta().total_seconds(),
            server_type="vllm-grpc",
            data_parallel_size=1,
            kv_cache_dtype="auto",
            block_size=model.limits.block_size_tokens,
            attention_backend=model.attention_backend,
            model_dtype=model.dtype,
            max_num_seqs=model.limits.num_slots,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: Context) -> vllm.GetLoadsResponse:
        stats = await self._manager.status()
        gauges, model = stats.gauges, self._manager.describe_model()
        tokens = gauges.num_blocks * model.limits.block_size_tokens
        load = vllm.SchedulerLoad(
            num_running_reqs=gauges.num_requests_running,
            num_waiting_reqs=gauges.num_requests_waiting,
            num_total_reqs=gauges.num_requests_running + gauges.num_requests_waiting,
            num_used_tokens=gauges.blocks_used * model.limits.block_size_tokens,
            max_total_num_tokens=tokens,
            token_usage=gauges.kv_cache_usage_ratio,
            gen_throughput=stats.generation_tokens_per_second,
            cache_hit_rate=stats.prefix_cache_hit_ratio,
            utilization=gauges.num_requests_running / max(1, model.limits.num_slots),
            max_running_requests=model.limits.num_slots,
            num_waiting_uncached_tokens=gauges.num_tokens_waiting,
        )
        now = datetime.now(UTC).isoformat()
        return vllm.GetLoadsResponse(timestamp=now, version=status_messages.VERSION, dp_rank_count=1, loads=[load])

    async def GetTokenizer(self, request: common.GetTokenizerRequest, context: Context) -> None:
        """Send the files of the tokenizer as a zip archive in pieces, the last one with the SHA-256 of all."""
        if self._archive is None or (self._archive.done() and self._archive.exception() is not None):
            self._archive = asyncio.ensure_future(asyncio.to_thread(_tokenizer_archive, self._model))
        data = await asyncio.shield(self._archive)
        async with self._service.writer(context) as writer:
            for start in range(0, len(data), _CHUNK_BYTES):
                is_last = start + _CHUNK_BYTES >= len(data)
                digest = hashlib.sha256(data).hexdigest() if is_last else ""
                await writer.write(common.GetTokenizerChunk(data=data[start : start + _CHUNK_BYTES], sha256=digest))

    async def SubscribeKvEvents(self, request: common.SubscribeKvEventsRequest, context: Context) -> None:
        """Stream what enters and leaves the prefix cache of this caller: first all that is in it, then changes."""
        salt, engine = identity.cache_salt(identity.caller(context)), self._manager.services.engine
        feed, loop = PrefixFeed(request.start_sequence_number), asyncio.get_running_loop()
        async with self._service.writer(context) as writer:
            while True:
                async with self._looking:  # a look takes seconds with a large cache
                    if self._manager.services.model.rejection() is not None:
                        return
                    await asyncio.sleep(self._rest_seconds)
                    started_at = loop.time()
                    found = await asyncio.wrap_future(engine.prefixes(salt))
                    batches = await asyncio.to_thread(feed.next_batches, *found)
                    self._rest_seconds = _REST_FACTOR * (loop.time() - started_at)
                for batch in batches:
                    await writer.write(batch)
                await asyncio.sleep(_EVENT_SECONDS)

    async def FlushCache(self, request: common.FlushCacheRequest, context: Context) -> common.FlushCacheResponse:
        """Empty the prefix cache. Requests in progress keep their blocks."""
        self._manager.services.engine.clear_prefix_cache()
        return common.FlushCacheResponse(success=True)


def _unsupported(name: str) -> Any:
    async def refuse(self: GatewayService, request: Any, context: Context) -> None:
        raise Unsupported(f"{name} is not offered")

    return refuse


for _name in ("StartProfile", "StopProfile"):
    setattr(GatewayService, _name, _unsupported(_name))


def add_to(server: grpc.aio.Server, service: GatewayService) -> None:
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(service, server)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _id(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


_PATTERNS = ("*token*.json", "config.json", "generation_config.json", "chat_template.*", "vocab.json", "merges.txt")
_MORE = ("*.jinja", "tokenizer.model")


def _tokenizer_archive(model: Path) -> bytes:
    """Return a zip of the tokenizer's files of a model directory. Equal files give equal bytes."""
    found = {path.name: path for pattern in (*_PATTERNS, *_MORE) for path in model.glob(pattern) if path.is_file()}
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(found):
            archive.writestr(zipfile.ZipInfo(name), found[name].read_bytes(), zipfile.ZIP_DEFLATED)
    return written.getvalue()
