"""Server reflection: each address describes exactly the methods that it serves."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.rpc import error_details_pb2, status_pb2
from grpc_api.test_real_clients import output_of
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from support.every_method import CHANNELZ, METHODS, REFLECTION, status_of
from support.npm import find_buf
from support.processes import Running
from support.serving import error_of, serving

from lineclear.scheduler.grpc_api.health_service import LIVE, READY, WORKER
from lineclear.scheduler.grpc_api.health_service import SERVICE as HEALTH

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE = "lineclear.v1.InferenceService"
HEALTH_METHODS = [f"/{HEALTH}/{name}" for name in ("Check", "Watch", "List")]
VERSIONS = ("v1", "v1alpha")
DETAILS = [message.full_name for message in error_details_pb2.DESCRIPTOR.message_types_by_name.values()]


class Described:
    """What one address says of itself: its services, and a pool with all files that a tool would fetch."""

    def __init__(self) -> None:
        self.services: set[str] = set()
        self.pool = descriptor_pool.DescriptorPool()  # as strict as a client's: every type must be present

    @property
    def methods(self) -> set[str]:
        found = ((name, self.pool.FindServiceByName(name).methods) for name in self.services)
        return {f"/{name}/{method.name}" for name, methods in found for method in methods}


def reflection_call(
    channel: Any, version: str, serializer: Any = reflection_pb2.ServerReflectionRequest.SerializeToString
) -> Any:
    return channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=serializer,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )()


async def described(channel: Any, version: str) -> Described:
    """Like k6 and buf: list services, fetch the file of each, then the files that it depends on."""
    call = reflection_call(channel, version)

    async def query(**what: str) -> Any:
        await call.write(reflection_pb2.ServerReflectionRequest(**what))
        answer = await call.read()
        assert not answer.HasField("error_response"), (what, answer.error_response)
        return answer

    found = Described()
    found.services = {entry.name for entry in (await query(list_services="*")).list_services_response.service}
    files: dict[str, descriptor_pb2.FileDescriptorProto] = {}
    for symbol in sorted(found.services | set(DETAILS)):
        some = (await query(file_containing_symbol=symbol)).file_descriptor_response.file_descriptor_proto
        files |= {f.name: f for f in map(descriptor_pb2.FileDescriptorProto.FromString, some)}
        for name in [name for file in files.values() for name in file.dependency]:
            some = (await query(file_by_filename=name)).file_descriptor_response.file_descriptor_proto
            files |= {f.name: f for f in map(descriptor_pb2.FileDescriptorProto.FromString, some)}
    await call.done_writing()
    while files:
        ready = [f for f in files.values() if not set(f.dependency) & files.keys()]
        assert ready, files.keys()
        for file in ready:
            found.pool.Add(files.pop(file.name))
    return found


@asynccontextmanager
async def addresses(tmp_path: Path, **settings: Any) -> AsyncIterator[list[Any]]:
    """The channels of all gRPC addresses of a server with these settings."""
    async with serving(tmp_path, lora_dir=str(tmp_path), **settings) as s:
        if not s.server.admin_address:
            yield [s.channel]
            return
        async with grpc.aio.insecure_channel(s.server.admin_address) as admin:
            yield [s.channel, admin]


@pytest.mark.parametrize("layout", ["data", "admin", "channelz"])
async def test_each_address_describes_exactly_the_methods_that_it_serves(tmp_path: Path, layout: str) -> None:
    admin = {} if layout == "data" else {"admin_listen": f"unix:{tmp_path}/a", "channelz": layout == "channelz"}
    async with addresses(tmp_path, **admin) as channels:
        for channel in channels:
            every = {*METHODS, *REFLECTION, *CHANNELZ, *HEALTH_METHODS}
            served = {method for method in every if await status_of(channel, method) != "UNIMPLEMENTED"}
            for version in VERSIONS:
                found = await described(channel, version)
                assert found.methods == served
                assert {f"/{name}/" for name in found.services} == {m[: m.rindex("/") + 1] for m in served}
            assert (f"/{SERVICE}/Generate" in served) == (channel is channels[0])


@pytest.mark.parametrize("version", VERSIONS)
async def test_what_an_address_does_not_serve_is_not_described(tmp_path: Path, version: str) -> None:
    async with addresses(tmp_path, admin_listen=f"unix:{tmp_path}/a") as (data, admin):
        for channel, symbol in (
            *((data, "lineclear.v1.AdminService"), (data, f"{SERVICE}.GetStats"), (admin, f"{SERVICE}.Generate")),
            *((data, "lineclear.wire.StepPlan"), (admin, "lineclear.wire.StepPlan")),  # the plan protocol is private
        ):
            call = reflection_call(channel, version)
            await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol))
            assert (await call.read()).error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0], symbol
            await call.done_writing()


async def test_health_list_is_called_by_its_description(tmp_path: Path) -> None:
    """Without a worker, at both addresses; only the first has reflection."""
    async with (
        serving(tmp_path, joined=False, health_listen="127.0.0.1:0") as s,
        grpc.aio.insecure_channel(s.server.health_address) as probes,
    ):
        method = (await described(s.channel, "v1")).pool.FindMethodByName(f"{HEALTH}.List")
        request, answer = (message_factory.GetMessageClass(kind) for kind in (method.input_type, method.output_type))
        for channel in (s.channel, probes):
            call = channel.unary_unary(
                f"/{HEALTH}/List", request_serializer=request.SerializeToString, response_deserializer=answer.FromString
            )
            statuses = {name: value.status for name, value in (await call(request())).statuses.items()}
            serving_names, waiting_names = dict.fromkeys((*LIVE, WORKER), SERVING), dict.fromkeys(READY, NOT_SERVING)
            assert statuses == serving_names | waiting_names


@pytest.mark.parametrize("version", VERSIONS)
async def test_error_details_are_shown_by_their_descriptions(tmp_path: Path, version: str) -> None:
    """Like grpcurl, which shows the details that reflection describes, and base64 of others."""
    async with addresses(tmp_path, admin_listen=f"unix:{tmp_path}/a") as channels:
        for channel, method in zip(
            channels, (f"/{SERVICE}/Generate", "/lineclear.v1.AdminService/SetLogLevel"), strict=True
        ):
            found = await described(channel, version)
            call = channel.unary_stream(method)(b"")
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
            trailers = dict(raised.value.trailing_metadata() or ())
            status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
            shown = json_format.MessageToDict(status, descriptor_pool=found.pool)
            assert {"ErrorInfo", "BadRequest"} <= {detail["@type"].rpartition(".")[2] for detail in shown["details"]}
            assert "fieldViolations" in str(shown)


@pytest.mark.parametrize("version", VERSIONS)
async def test_malformed_reflection_request_is_an_error(tmp_path: Path, version: str) -> None:
    async with addresses(tmp_path) as (channel,):
        raw = reflection_call(channel, version, bytes)
        await raw.write(b"\x1a\x02\xff\xfe")
        assert (await error_of(raw)).reason == "MALFORMED_MESSAGE"


async def test_reflection_can_be_switched_off(tmp_path: Path) -> None:
    async with addresses(tmp_path, reflection=False, admin_listen=f"unix:{tmp_path}/a") as channels:
        for channel in channels:
            for method in REFLECTION:
                assert await status_of(channel, method) == "UNIMPLEMENTED"


def test_buf_curl_lists_and_calls(start: Callable[..., Running]) -> None:
    """With an admin address, as the README recommends."""
    buf = find_buf()
    server = start("--admin-listen", "127.0.0.1:0")
    admin = server.wait_for("listening")["admin_address"]

    def curl(*arguments: str, fails: bool = False) -> str:
        protocol = ("--protocol", "grpc", "--http2-prior-knowledge", "--reflect-protocol", "grpc-v1")
        return output_of(buf, "curl", *protocol, *arguments, fails=fails)

    url = f"http://{server.address}"
    methods = set(curl("--list-methods", url).split())
    assert {f"{SERVICE}/Generate", f"{HEALTH}/List"} <= methods
    assert not {method for method in methods if "AdminService" in method}
    request = {"text": "once", "sampling": {"max_tokens": 3, "ignore_eos": True}}
    assert "finished" in curl("--data", json.dumps(request), f"{url}/{SERVICE}/Generate")
    request["sampling"] = {"top_p": 7}
    # buf decodes no details over gRPC, with any server.
    shown = json.loads(curl("--data", json.dumps(request), f"{url}/{SERVICE}/Generate", fails=True))
    assert "google.rpc.BadRequest" in {detail["type"] for detail in shown["details"]}
    assert "schedulingPolicy" in curl("--data", "{}", f"http://{admin}/lineclear.v1.AdminService/GetScheduling")
