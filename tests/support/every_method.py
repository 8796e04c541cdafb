"""Every method that the server has, and calls of a method by its name."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import grpc
import grpc.aio
from grpc_channelz.v1 import channelz_pb2
from support.serving import BOUND_SECONDS

from lineclear import v1
from lineclear.scheduler.grpc_api.server import CHANNELZ as CHANNELZ_NAME
from lineclear.v1 import steps_pb2

REFLECTION = [f"/grpc.reflection.{v}.ServerReflection/ServerReflectionInfo" for v in ("v1", "v1alpha")]
FILES = [importlib.import_module(f"lineclear.v1.{module.name}") for module in pkgutil.iter_modules(v1.__path__)]
METHODS = [
    f"/{service.full_name}/{method.name}"
    for file in FILES
    if file.__name__.endswith("_pb2")
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
ADMIN = [method for method in METHODS if "/lineclear.v1.AdminService/" in method]
CHANNELZ = [f"/{CHANNELZ_NAME}/{m.name}" for m in channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].methods]
HEALTH = [f"/grpc.health.v1.Health/{method}" for method in ("Check", "Watch")]


WATCH_STATE = steps_pb2.WatchStepsRequest(include_state=True).SerializeToString()


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def status_of(channel: Any, method: str, *metadata: tuple[str, str]) -> str:
    """Call a method of any kind with an empty message; return its status, or "OK" after the first response.

    WatchSteps would respond at the next step, and responds with the state at once if it is asked for that.
    """
    # unary_stream sends the message and its end in one write. In two writes the second may fail on a rejected call
    # before the status is read, and gRPC's client then reports INTERNAL.
    request = WATCH_STATE if method.endswith("/WatchSteps") else b""
    call = channel.unary_stream(method)(request, metadata=metadata or None, timeout=BOUND_SECONDS)
    try:
        answer = await call.read()
        return "OK" if answer is not grpc.aio.EOF else (await call.code()).name
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    finally:
        call.cancel()
