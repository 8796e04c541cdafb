"""A scheduler process without gRPC: `python -m support.toy_scheduler DIRECTORY NUM_STREAMS WORKER_OPTIONS_AS_JSON`.

It keeps `NUM_STREAMS` endless requests running until SIGTERM and writes a line of JSON to standard output when a
worker starts or joins: {"joined": pid}. It supervises a toy worker with the options; `null` starts none.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from support.engine_harness import EngineHarness, request, supervised
from support.toy_worker import ToyOptions

from lineclear.process.logging_setup import configure
from lineclear.scheduler.core.events import Event, Finished
from lineclear.scheduler.engine.worker_pool import WorkerPool
from lineclear.wire.messages import Hello


class _Harness(EngineHarness):
    def worker_joined(self, hello: Hello) -> None:
        print(json.dumps({"joined": hello.pid}), flush=True)
        super().worker_joined(hello)


def serve(directory: Path, num_streams: int, options: dict[str, Any] | None) -> None:
    stop, numbers = threading.Event(), count()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

    def submit(num_requests: int) -> None:
        for _ in range(num_requests):
            harness.submit(request(next(numbers), prompt_len=20, max_tokens=400))

    def publish(events: Sequence[Event]) -> None:
        submit(sum(isinstance(event, Finished) for event in events))

    def wait(pool: WorkerPool) -> None:
        print(json.dumps({"started": pool.pids[0]}), flush=True)
        stop.wait()

    with _Harness(directory=directory, options=ToyOptions(**options or {})) as harness:
        harness.on_publish = publish
        submit(num_streams)
        if options is None:
            stop.wait()
        else:
            supervised(harness, wait)


if __name__ == "__main__":
    configure("scheduler", form="json")
    serve(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
