"""grpc.reflection.v1 and v1alpha: the services of a listener and their descriptors.

Each listener describes exactly the methods that it serves. The library has v1alpha only. v1 is the same on the wire, so
its descriptor is derived from that of v1alpha. Tools ask for v1 first, and for the descriptor of every listed service.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor, descriptor_pb2, descriptor_pool
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

_ALPHA_PACKAGE, _PACKAGE = "grpc.reflection.v1alpha", "grpc.reflection.v1"
SERVICES = (f"{_PACKAGE}.ServerReflection", f"{_ALPHA_PACKAGE}.ServerReflection")
"""The names of the reflection services."""
_Pool = descriptor_pool.DescriptorPool


def add(server: grpc.aio.Server, services: Sequence[str], has: Callable[[str], bool]) -> None:
    """Offer reflection of `services` and of itself on `server`: the methods for which `has` is true."""
    pool = _Pool()
    for service in services:
        _add_file(pool, descriptor_pool.Default().FindFileContainingSymbol(service), has)
    # Without these a tool shows the details of an error as base64.
    _add_file(pool, error_details_pb2.DESCRIPTOR, has)
    _add_file(pool, reflection_pb2.DESCRIPTOR, has)
    pool.AddSerializedFile(_v1_file().SerializeToString())
    servicer = reflection.aio.ReflectionServicer((*services, *SERVICES), pool)

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


def _add_file(pool: _Pool, source: descriptor.FileDescriptor, has: Callable[[str], bool]) -> None:
    """Add a file and those that it imports, unless the pool has it."""
    try:
        pool.FindFileByName(source.name)
    except KeyError:
        pass
    else:
        return
    for imported in source.dependencies:
        _add_file(pool, imported, has)
    file = descriptor_pb2.FileDescriptorProto()
    source.CopyToProto(file)
    if source.name == health_pb2.DESCRIPTOR.name:
        _add_health_list(file)
    for service in file.service:
        served = [method for method in service.method if has(f"/{file.package}.{service.name}/{method.name}")]
        del service.method[:]
        service.method.extend(served)
    pool.AddSerializedFile(file.SerializeToString())


def _v1_file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name, file.package = f"{_PACKAGE.replace('.', '/')}/reflection.proto", _PACKAGE
    described = [field for message in file.message_type for field in message.field if field.type_name]
    for field in described:
        field.type_name = _renamed(field.type_name)
    for method in file.service[0].method:
        method.input_type, method.output_type = _renamed(method.input_type), _renamed(method.output_type)
    return file


def _renamed(name: str) -> str:
    return name.replace(f".{_ALPHA_PACKAGE}.", f".{_PACKAGE}.")


def _add_health_list(file: descriptor_pb2.FileDescriptorProto) -> None:
    """Add the method List, which grpc.health.v1 has and grpcio-health-checking 1.75 does not."""
    if any(method.name == "List" for method in file.service[0].method):
        return
    file.message_type.add(name="HealthListRequest")
    answer = file.message_type.add(name="HealthListResponse")
    entry = answer.nested_type.add(name="StatusesEntry", options=descriptor_pb2.MessageOptions(map_entry=True))
    Field = descriptor_pb2.FieldDescriptorProto
    entry.field.add(name="key", number=1, label=Field.LABEL_OPTIONAL, type=Field.TYPE_STRING)
    status = f".{file.package}.HealthCheckResponse"
    entry.field.add(name="value", number=2, label=Field.LABEL_OPTIONAL, type=Field.TYPE_MESSAGE, type_name=status)
    name = f".{file.package}.HealthListResponse"
    answer.field.add(
        name="statuses", number=1, label=Field.LABEL_REPEATED, type=Field.TYPE_MESSAGE, type_name=f"{name}.{entry.name}"
    )
    file.service[0].method.add(name="List", input_type=f".{file.package}.HealthListRequest", output_type=name)
