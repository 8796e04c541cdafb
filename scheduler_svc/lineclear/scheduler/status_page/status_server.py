"""HTTP server of the status page, with TLS where the other listeners have it.

The page and its files hold no data and are served to everyone who can connect. The steps need the admin token where
there is one: the page sends it in a header, so that it is in no address and no log. Without a token only requests that
name this machine are answered, so that a foreign page cannot read the steps through a name of its own (DNS rebinding).
"""

from __future__ import annotations

import base64
import ipaddress
import json
import re
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import structlog
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from lineclear.errors import TooManyWatchers
from lineclear.process.logging_setup import should_log
from lineclear.scheduler.http_listener import SOCKET_KEY, HttpListener
from lineclear.scheduler.observe.scheduler_state import TakenState
from lineclear.scheduler.observe.step_feed import StepFeed, StepWatcher
from lineclear.scheduler.security.reloading_file import ReloadingFile
from lineclear.scheduler.security.token_file import TokenTable

log = structlog.get_logger()

STEPS_PATH, STATS_PATH = "/status/steps", "/status/stats"
_STATIC = Path(__file__).parent / "static"
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/status": ("index.html", "text/html; charset=utf-8"),
    "/status/status.js": ("status.js", "text/javascript; charset=utf-8"),
    "/status/pictures.js": ("pictures.js", "text/javascript; charset=utf-8"),
    "/status/status.css": ("status.css", "text/css; charset=utf-8"),
}
_HEADERS = (  # wsgiref adds to the list that a response gets
    ("Content-Security-Policy", "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
)
_MAX_PAGE_CONNECTIONS = 16
_INTERVAL_SECONDS = 0.2
_KEEP_ALIVE_SECONDS = 2.0  # a client that has gone is found by the next write
_STATE_SECONDS = 1.0

StartResponse = Callable[..., Any]


class StatusServer(HttpListener):
    """Serves the page and its stream until `close`. A stream that does not read for 5 seconds is closed."""

    def __init__(
        self,
        address: str,
        steps: StepFeed,
        tokens: ReloadingFile[TokenTable] | None,
        max_streams: int,
        stats: Callable[[], Message],
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """Listen on `address`, a host:port. Raises ConfigurationError if that fails.

        `stats` returns the figures of GetStats. Raises TimeoutError.
        """
        super().__init__(address, "status", _MAX_PAGE_CONNECTIONS + max_streams, tls)
        self.url = f"{'https' if tls else 'http'}://{self.address}/status"
        self.num_rejected = 0
        self._steps, self._tokens, self._stats = steps, tokens, stats
        self._files = {path: ((_STATIC / name).read_bytes(), kind) for path, (name, kind) in _FILES.items()}
        self.serve(self._answer)

    def _answer(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return _refuse(start_response, "405 Method Not Allowed", "use GET")
        if self._tokens is None and not _names_this_machine(environ.get("HTTP_HOST", "")):
            return _refuse(start_response, "403 Forbidden", "without an admin token, use the name localhost")
        path = environ["PATH_INFO"]
        if path in (STEPS_PATH, STATS_PATH) and environ["REQUEST_METHOD"] == "GET":
            return self._data(environ, start_response)
        if path == "/favicon.ico":  # every browser asks for one
            start_response("204 No Content", [*_HEADERS])
            return []
        if path not in self._files:
            return _refuse(start_response, "404 Not Found", "the page is at /status")
        content, kind = self._files[path]
        start_response("200 OK", [("Content-Type", kind), ("Content-Length", str(len(content))), *_HEADERS])
        return [content]

    # --- steps and figures ------------------------------------------------------------------------------------------

    def _data(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("HTTP_SEC_FETCH_SITE", "same-origin") not in ("same-origin", "none"):
            return _refuse(start_response, "403 Forbidden", "the data are for the page of this server only")
        name = self._caller(environ)
        if name is None:
            self._count_rejected()
            return _refuse(start_response, "401 Unauthorized", "a valid admin token is required")
        if environ["PATH_INFO"] == STEPS_PATH:
            return self._stream(environ, start_response, name)
        try:
            content = _json(self._stats())
        except TimeoutError:
            return _refuse(start_response, "503 Service Unavailable", "the engine did not answer in time")
        start_response(
            "200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(content))), *_HEADERS]
        )
        return [content]

    def _stream(self, environ: dict[str, Any], start_response: StartResponse, name: str) -> Iterable[bytes]:
        try:
            watcher = self._steps.watch(_history(environ))
        except TooManyWatchers as error:
            return _refuse(start_response, "503 Service Unavailable", str(error))
        log.warning("admin_call", rpc="status_page", name=name)
        self.keep(environ[SOCKET_KEY])
        start_response("200 OK", [("Content-Type", "text/event-stream; charset=utf-8"), *_HEADERS])
        events = self._events(watcher, lambda: self._caller(environ) == name)
        next(events)  # wsgiref closes the stream, perhaps before the first event: from here on that frees the place
        return events

    def _events(self, watcher: StepWatcher, is_allowed: Callable[[], bool]) -> Iterator[bytes]:
        with watcher:
            yield b""
            sent_at = time.monotonic()
            while not self._steps.is_closed and is_allowed():
                if watcher.is_replaced:
                    return  # the page connects again
                response = watcher.read(self._state(), block_maps=True)
                if response.ByteSize():
                    yield b"data:" + _json(response) + b"\n\n"
                    sent_at = time.monotonic()
                elif time.monotonic() - sent_at > _KEEP_ALIVE_SECONDS:
                    yield b":\n\n"
                    sent_at = time.monotonic()
                if not watcher.has_more or not response.steps:
                    self._steps.sleep(_INTERVAL_SECONDS)
            yield b"event:end\ndata:{}\n\n"

    def _state(self) -> TakenState | None:
        """Return the state, or None while the engine is too busy to take it."""
        try:
            return self._steps.state().result(_STATE_SECONDS)
        except TimeoutError:
            return None

    # --- who may watch ----------------------------------------------------------------------------------------------

    def _caller(self, environ: dict[str, Any]) -> str | None:
        """Return the name of the token, "" where none is required, or None."""
        if self._tokens is None:
            return ""
        scheme, _, token = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        return self._tokens.current().name_of(token.strip()) if scheme.lower() == "bearer" else None

    def _count_rejected(self) -> None:
        self.num_rejected += 1
        if should_log(self.num_rejected):
            log.warning("auth_failures", num_rejected=self.num_rejected, problem="status_page")


def _json(message: Message) -> bytes:
    return json.dumps(message, default=_plain, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    """Return a message, or a part of one that JSON lacks, as JSON has it. Times are seconds."""
    if isinstance(value, Duration | Timestamp):
        return value.ToNanoseconds() / 1e9
    if isinstance(value, Message):
        fields = value.DESCRIPTOR.fields
        return {f.name: getattr(value, f.name) for f in fields if not f.has_presence or value.HasField(f.name)}
    return base64.b64encode(value).decode() if isinstance(value, bytes) else list(value)


def _refuse(start_response: StartResponse, status: str, message: str) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8"), *_HEADERS])
    return [f"{message}\n".encode()]


def _names_this_machine(host: str) -> bool:
    name = re.sub(r":[0-9]*$", "", host) if host.count(":") == 1 or host.startswith("[") else host
    try:
        return name == "localhost" or ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _history(environ: dict[str, Any]) -> int:
    text = parse_qs(environ.get("QUERY_STRING", "")).get("history", ["0"])[0]
    return int(text) if text.isdecimal() and len(text) < 9 else 0
