"""`--gateway`: the gateway smg as a child process. It offers the OpenAI and Anthropic APIs over HTTP.

smg speaks vllm.grpc.engine.VllmEngine with this server. It is started again when it exits, and ends with the scheduler,
however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import structlog

from lineclear.process import logging_setup
from lineclear.process.parent_death import ParentDeathPipe
from lineclear.process.standard_error import write_stderr
from lineclear.scheduler.addresses import parse_address
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.scheduler.text.parsed_answer import AnswerParsers

log = structlog.get_logger()

_PROGRAM = (
    "import sys; from lineclear.process import parent_death; parent_death.die_with_parent(); from smg.cli import main;"
    " sys.exit(main())"
)
_POLL_SECONDS, _START_SECONDS, _STOP_SECONDS = 0.2, 1800, 5.0  # a large model loads for minutes
_ESCAPED = 3  # bytes of JSON for a byte of text, from a client that escapes all but ASCII
_MIN_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = 1.0, 60.0
_CALL_PARSERS = {"hermes": "qwen", "llama3_json": "llama"}
"""smg's names. Not its "mistral": smg then forces calls with structural tags, which lineclear does not have."""


class HttpGateway:
    """Runs smg at an HTTP address, before the listener for gateways at another. Used on the event loop."""

    def __init__(
        self, settings: SchedulerSettings, engine_address: str, parsers: AnswerParsers, *, shows_example: bool
    ) -> None:
        """`parsers`: those of the server. smg would choose its own by the name of the model.

        `shows_example`: print a command that tries the API, beside the log lines.
        """
        http_address, traces = settings.gateway_http, settings.otlp_traces_endpoint
        parsed = parse_address(http_address)
        assert not isinstance(parsed, str), "the settings refuse a unix socket"
        host, port = parsed
        self._url, self._shows_example = f"http://{http_address}", shows_example
        options = {"--worker-urls": f"grpc://{engine_address}", "--host": host.strip("[]"), "--port": port}
        options |= {"--worker-startup-timeout-secs": _START_SECONDS, "--worker-startup-check-interval": 1}
        options |= {"--log-level": "warn", "--prometheus-host": "127.0.0.1"}  # smg's choice would be all interfaces
        options |= {"--policy": "round_robin", "--retry-max-retries": 1}  # there is one replica: nothing to choose
        options |= {"--max-payload-size": _ESCAPED * settings.max_request_bytes}
        options |= {"--shutdown-grace-period-secs": 1}  # it takes half of it, at most 5 s, also when nothing runs
        if parsers.tool_calls in _CALL_PARSERS:
            options["--tool-call-parser"] = _CALL_PARSERS[parsers.tool_calls]
        if parsers.reasoning:
            options["--reasoning-parser"] = parsers.reasoning
        if traces.startswith("http://"):  # smg sends plaintext, and makes spans at this level only
            options |= {"--otlp-traces-endpoint": urlsplit(traces).netloc, "--log-level": "info"}
        self._arguments = ["launch", *(str(part) for option in options.items() for part in option)]
        self._arguments += ["--enable-trace"] * ("--otlp-traces-endpoint" in options)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep smg running during the block."""
        task = asyncio.ensure_future(self._run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait((task,))

    async def _run(self) -> None:
        backoff_seconds = _MIN_BACKOFF_SECONDS
        lifeline = ParentDeathPipe()
        try:
            while True:
                started_at = asyncio.get_running_loop().time()
                code = await self._run_once(lifeline)
                log.error("gateway_exited", exit_code=code, restart_in_seconds=backoff_seconds)
                await asyncio.sleep(backoff_seconds)
                is_short = asyncio.get_running_loop().time() - started_at < _MAX_BACKOFF_SECONDS
                backoff_seconds = min(2 * backoff_seconds, _MAX_BACKOFF_SECONDS) if is_short else _MIN_BACKOFF_SECONDS
        finally:
            lifeline.close()

    async def _run_once(self, lifeline: ParentDeathPipe) -> int:
        """Run one process until it exits. It is stopped when this is cancelled."""
        with socket.create_server(("127.0.0.1", 0)) as probe:  # smg's own choice is taken where another smg runs
            metrics = ("--prometheus-port", str(probe.getsockname()[1]))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", _PROGRAM, *self._arguments, *metrics),
            env=os.environ | lifeline.environment(),
            pass_fds=lifeline.inherited,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=logging_setup.standard_error_of_children(),
            start_new_session=True,  # a Ctrl-C must reach only the scheduler, which drains first
        )
        ready = asyncio.ensure_future(self._announce())
        try:
            return await process.wait()
        finally:
            ready.cancel()
            if process.returncode is None:
                process.terminate()
                try:
                    await asyncio.wait_for(process.wait(), _STOP_SECONDS)
                except TimeoutError:
                    process.kill()
                    await process.wait()
                log.info("gateway_stopped", exit_code=process.returncode)

    async def _announce(self) -> None:
        """Log where the API is once it answers."""
        while True:
            if (model := await asyncio.to_thread(self._model)) is not None:
                break
            await asyncio.sleep(_POLL_SECONDS)
        log.info("gateway_serving", url=f"{self._url}/v1", model=model)
        if self._shows_example:
            body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16})
            write_stderr(f"try: curl {self._url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'")

    def _model(self) -> str | None:
        """Return the name of the model that the gateway offers; None until it has its tokenizer, too."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            if models := self._ask("models")["data"]:
                self._ask("tokenize", {"model": models[0]["id"], "prompt": "a"})
                return str(models[0]["id"])
        return None

    def _ask(self, path: str, body: dict[str, str] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self._url}/v1/{path}", data, {"Content-Type": "application/json"})
        with build_opener(ProxyHandler({})).open(request, timeout=_POLL_SECONDS * 5) as answer:
            return json.load(answer)
