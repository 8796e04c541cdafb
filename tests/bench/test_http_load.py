"""The HTTP driver against a server of a few lines that streams as llama-server and vLLM do."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from bench.http_load import Dialect, Server, free_port, llama_server, load, openai
from bench.measure import Result
from bench.workloads import make


class Fake:
    """Streams the requested number of tokens, one per event."""

    def __init__(self, refuse: bool = False) -> None:
        self.refuse = refuse
        self.asked: list[dict[str, Any]] = []
        self.running = self.most = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length"))
        body = json.loads(await reader.readexactly(length))
        self.asked.append(body)
        if self.refuse:
            writer.write(b"HTTP/1.1 503 Busy\r\nConnection: close\r\n\r\nbusy")
            writer.close()
            return
        self.running += 1
        self.most = max(self.most, self.running)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for data in self.events(body):
            text = f"data: {data}\n\n".encode()
            writer.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0)
        self.running -= 1
        writer.close()

    def events(self, body: dict[str, Any]) -> list[str]:
        if "n_predict" in body:
            made = [{"tokens": [7], "stop": False}] * body["n_predict"]
            return [json.dumps(event) for event in [*made, {"tokens": [], "stop": True}]]
        made = [{"choices": [{"text": "x"}]}] * body["max_tokens"]
        return [*(json.dumps(event) for event in made), "[DONE]"]


async def run(dialect: Dialect, fake: Fake, concurrency: int = 0) -> Result:
    port = free_port()
    listening = await asyncio.start_server(fake.answer, "127.0.0.1", port)
    async with listening:
        timed = await load(Server(0, port, 0.0), dialect, make("w1", 6), concurrency)
    return timed.end("fake", "model", {})


@pytest.mark.parametrize("dialect", [llama_server(True), openai("model")], ids=["llama", "openai"])
def test_every_token_is_counted(dialect: Dialect) -> None:
    fake = Fake()
    result = asyncio.run(run(dialect, fake))
    assert result.output_tokens == result.workload["wanted_tokens"]
    assert len(fake.asked) == 7  # and one to warm up
    assert all(body["ignore_eos"] and body["stream"] and body["temperature"] == 0 for body in fake.asked)
    assert sorted(len(body["prompt"]) for body in fake.asked[1:]) == sorted(len(j.prompt) for j in make("w1", 6).jobs)


def test_closed_loop_limits_concurrency() -> None:
    fake = Fake()
    asyncio.run(run(openai("model"), fake, concurrency=2))
    assert fake.most == 2


def test_refusal_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="503"):
        asyncio.run(run(openai("model"), Fake(refuse=True)))
