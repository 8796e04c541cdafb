"""Viewers of the status page over HTTP."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

from support.processes import Running
from support.time_limits import PATIENCE_SECONDS

TOKEN = "watcher-0123456789abcdef"


def address(server: Running) -> tuple[str, int]:
    host, _, port = server.wait_for("status_page_listening")["url"].split("/")[2].rpartition(":")
    return host, int(port)


def get(server: Running, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(*address(server), timeout=PATIENCE_SECONDS)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    return connection.getresponse()


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the data of each event up to the end of the stream."""
    assert response.status == 200, response.read()
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    for line in response:
        if line.startswith(b"data:"):
            yield json.loads(line.removeprefix(b"data:"))
