"""grpc.reflection.v1 and v1alpha: the services of a listener and their descriptors.

The library has v1alpha only. v1 is the same on the wire, so its descriptor is derived from that of v1alpha. Tools ask
for v1 first, and for the descriptor of every listed service.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2

_ALPHA_PACKAGE, _PACKAGE = "grpc.reflection.v1alpha", "grpc.reflection.v1"
SERVICES = (f"{_PACKAGE}.ServerReflection", f"{_ALPHA_PACKAGE}.ServerReflection")
"""The names of the reflection services."""


def add(server: grpc.aio.Server, *services: str) -> None:
    """Offer reflection of `services` and of itself on `server`."""
    _add_descriptor()
    servicer = reflection.aio.ReflectionServicer((*services, *SERVICES))

    async def info(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async for response in servicer.ServerReflectionInfo(requests, context):
            await context.write(response)

    method = grpc.stream_stream_rpc_method_handler(
        info,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = (grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method}) for name in SERVICES)
    server.add_generic_rpc_handlers(tuple(handlers))


def _add_descriptor() -> None:
    """Add the descriptor of v1 to the pool that the servicer reads."""
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name, file.package = f"{_PACKAGE.replace('.', '/')}/reflection.proto", _PACKAGE
    described = [field for message in file.message_type for field in message.field if field.type_name]
    for field in described:
        field.type_name = _renamed(field.type_name)
    for method in file.service[0].method:
        method.input_type, method.output_type = _renamed(method.input_type), _renamed(method.output_type)
    descriptor_pool.Default().Add(file)


def _renamed(name: str) -> str:
    return name.replace(f".{_ALPHA_PACKAGE}.", f".{_PACKAGE}.")
