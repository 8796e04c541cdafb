"""Calls of a `Serving` in one line: an answer computed at once, the engine's request, and the fields of an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from support.serving import Serving, error_of, read_all

from lineclear.errors import InvalidRequest
from lineclear.scheduler.core.sequence import Request
from lineclear.v1 import inference_pb2 as pb


def of_tenant(name: str) -> dict[str, Any]:
    """Return the options of a call of this tenant."""
    return {"metadata": (("x-tenant-id", name),)}


async def answered(
    s: Serving, tokens: Sequence[int], request: pb.GenerateRequest | None = None, first_index: int = 0
) -> list[pb.GenerateResponse]:
    """Return the responses from `first_index` on where `tokens` is the whole answer."""
    s.engine.answer = lambda _: tokens
    return await read_all(s.generate(request), first_index)


async def engine_request(s: Serving, request: pb.GenerateRequest | None = None) -> Request:
    await answered(s, [], request)
    return s.engine.submitted[-1]


async def invalid_fields(call: Any) -> list[str]:
    """Return the fields that the error of a call names."""
    error = await error_of(call)
    assert isinstance(error, InvalidRequest)
    assert error.code == "INVALID_ARGUMENT"
    return [violation.field for violation in error.violations]
