"""A scheduler process without gRPC: `python -m support.toy_scheduler DIRECTORY NUM_STREAMS WORKER_COMMAND_AS_JSON`.

Engine, link and supervisor as in the product. It keeps `NUM_STREAMS` endless requests running and writes a line of
JSON to standard output when a worker starts or joins: {"joined": pid}. An empty command starts no worker.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from support.engine_harness import request

from lineclear.process.logging_setup import configure
from lineclear.scheduler.core.events import Event, Finished
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.engine.engine import Engine
from lineclear.scheduler.engine.worker_link import WorkerLink
from lineclear.scheduler.engine.worker_subscribers import EngineCallbacks
from lineclear.scheduler.engine.worker_supervisor import WorkerSupervisor
from lineclear.wire.messages import Hello


async def serve(directory: Path, num_streams: int, command: list[str]) -> None:
    """Run until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    numbers = count()

    def submit() -> None:
        engine.submit(request(next(numbers), prompt_len=20, max_tokens=400))

    def publish(events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Finished):
                submit()

    class Supervisor(WorkerSupervisor):
        def worker_joined(self, hello: Hello) -> None:
            print(json.dumps({"joined": hello.pid}), flush=True)
            super().worker_joined(hello)

    supervisor = Supervisor(command, on_exit=lambda pid, _: engine.worker_exited(pid), on_give_up=lambda _: stop.set())
    link = WorkerLink(directory)
    engine = Engine(Scheduler(CoreLimits()), link, supervisor, EngineCallbacks(publish))
    engine.start()
    for _ in range(num_streams):
        submit()
    if command:
        supervisor.start()
        print(json.dumps({"started": supervisor.pids[0]}), flush=True)
    await stop.wait()
    engine.release_worker()
    await supervisor.stop()
    engine.stop()
    link.close()


if __name__ == "__main__":
    configure("scheduler", form="json")
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])))
