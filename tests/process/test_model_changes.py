"""A worker comes back as another model: what began on the first one ends, and is never continued by the other."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

from support.engine_harness import World, request, supervised
from support.toy import expected, fingerprint
from support.toy_worker import ToyOptions

from lineclear.errors import ModelChanged, ModelReplaced
from lineclear.scheduler.core.events import Failed, Finished
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.engine.worker_supervisor import WorkerSupervisor


def test_new_model_answers_only_waiting_requests_that_name_no_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.write_text("")
    options = ToyOptions(min_step_seconds=0.002, max_step_seconds=0.004, model_file=str(model))
    with World(options=options, core=CoreLimits(max_batch_size=1)) as world:

        def body(supervisor: WorkerSupervisor) -> None:
            world.wait_joined()
            running = world.submit(request(1, max_tokens=400))
            world.wait(lambda: len(running.tokens) > 5, what="tokens of the first model")
            waiting = world.submit(request(2))
            named = world.submit(replace(request(3), model_fingerprint=fingerprint("")))
            ahead = world.submit(replace(request(4), model_fingerprint=fingerprint("b")))
            world.wait_ended([ahead])
            model.write_text("b")
            assert supervisor.pid is not None
            os.kill(supervisor.pid, signal.SIGKILL)
            world.wait_joined(2)
            world.wait_ended([running, waiting, named])
            for stream in (running, named, ahead):
                assert isinstance(stream.end, Failed)
                assert isinstance(stream.end.error, ModelChanged)
                assert stream.end.error.retry_after_seconds is None
            first = expected(running.request.prompt, running.request.sampling, 400, options.vocab_size)
            assert running.tokens == first[: len(running.tokens)]
            assert (named.tokens, ahead.tokens) == ([], [])
            assert isinstance(waiting.end, Finished)
            asked = waiting.request
            assert waiting.tokens == expected(asked.prompt, asked.sampling, asked.max_tokens, options.vocab_size, "b")

        supervised(world, body)


def test_same_model_continues_all_requests(tmp_path: Path) -> None:
    options = ToyOptions(min_step_seconds=0.002, max_step_seconds=0.004, model="b")
    with World(options=options) as world:

        def body(supervisor: WorkerSupervisor) -> None:
            world.wait_joined()
            stream = world.submit(replace(request(1, max_tokens=100), model_fingerprint=fingerprint("b")))
            world.wait(lambda: len(stream.tokens) > 5, what="tokens")
            assert supervisor.pid is not None
            os.kill(supervisor.pid, signal.SIGKILL)
            world.wait_ended([stream])
            asked = stream.request
            assert stream.tokens == expected(asked.prompt, asked.sampling, 100, options.vocab_size, "b")

        supervised(world, body)


def test_new_vocabulary_refuses_waiting_requests_retryably() -> None:
    with World(options=ToyOptions(vocab_size=50)) as world:
        stream = world.submit(replace(request(1), vocabulary=(97, (0,))))
        world.start_worker()
        world.wait_ended([stream])
        assert isinstance(stream.end, Failed)
        assert isinstance(stream.end.error, ModelReplaced)
        assert stream.end.error.retry_after_seconds == 0.0
