"""A worker is killed, and the recording of what led to it replays in another process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.engine_harness import ENVIRONMENT, EngineHarness, kill, request, supervised
from support.time_limits import PATIENCE_SECONDS
from support.toy_worker import ToyOptions

from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.engine.worker_pool import WorkerPool
from lineclear.scheduler.flight_recorder.recorder import RecordingScheduler
from lineclear.scheduler.flight_recorder.recording_files import RecordingFiles


def test_the_loss_of_a_worker_leaves_a_recording_that_replays(tmp_path: Path) -> None:
    core = RecordingScheduler(CoreLimits(max_batch_size=64))
    recordings = RecordingFiles(core, tmp_path / "recordings")
    options = ToyOptions(min_step_seconds=0.001, max_step_seconds=0.002)
    with EngineHarness(options=options, core=core, on_anomaly=recordings.dump) as harness:

        def body(pool: WorkerPool) -> None:
            harness.wait_joined()
            streams = [harness.submit(request(index, max_tokens=100)) for index in range(8)]
            harness.wait(lambda: all(len(stream.tokens) > 10 for stream in streams))
            kill(pool.pids[0])
            harness.wait_ended(streams)
            for stream in streams:
                stream.check(options.vocab_size)

        supervised(harness, body)
    recordings.wait()
    (file,) = (tmp_path / "recordings").iterdir()
    assert "WorkerLost" in file.read_text()
    command = [sys.executable, "-m", "lineclear.scheduler.main", "replay", str(file)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every decision the same" in done.stdout
