"""Which adapters the live requests use, for the metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lineclear.scheduler.requests.request_context import RequestContext


class AdapterUse(NamedTuple):
    """The names of adapters with requests that run, and with requests that wait, sorted, and the limit of adapters."""

    max_loras: int
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


def adapter_use(max_loras: int, requests: Iterable[RequestContext]) -> AdapterUse:
    """Return the use of adapters by `requests`."""
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for request in requests:
        if request.adapter is not None:
            names[request.has_started].add(request.adapter.name)
    return AdapterUse(max_loras, tuple(sorted(names[True])), tuple(sorted(names[False])))
