"""A worker returns with another model: answers that have started end, and the new model never continues them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from support.engine_harness import EngineHarness, kill, request, supervised
from support.toy import expected, fingerprint
from support.toy_worker import ToyOptions

from lineclear.errors import ModelChanged, ModelReplaced
from lineclear.scheduler.core.events import Failed, Finished
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.engine.worker_pool import WorkerPool


def test_new_model_answers_only_waiting_requests_that_name_no_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.write_text("")
    options = ToyOptions(min_step_seconds=0.002, max_step_seconds=0.004, model_file=str(model))
    with EngineHarness(options=options, core=CoreLimits(max_batch_size=1)) as harness:

        def body(pool: WorkerPool) -> None:
            harness.wait_joined()
            running = harness.submit(request(1, max_tokens=400))
            harness.wait(lambda: len(running.tokens) > 5, what="tokens of the first model")
            waiting = harness.submit(request(2))
            named = harness.submit(replace(request(3), model_fingerprint=fingerprint("")))
            ahead = harness.submit(replace(request(4), model_fingerprint=fingerprint("b")))
            harness.wait_ended([ahead])
            model.write_text("b")
            kill(pool.pids[0])
            harness.wait_joined(2)
            harness.wait_ended([running, waiting, named])
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

        supervised(harness, body)


def test_new_vocabulary_refuses_waiting_requests_retryably() -> None:
    with EngineHarness(options=ToyOptions(vocab_size=50)) as harness:
        stream = harness.submit(replace(request(1), vocabulary=(97, (0,))))
        harness.start_worker()
        harness.wait_ended([stream])
        assert isinstance(stream.end, Failed)
        assert isinstance(stream.end.error, ModelReplaced)
        assert stream.end.error.retry_after_seconds == 0.0
