"""Flight recordings are bounded, private and without content."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from core.harness import CoreHarness
from simulation.mutations import Bug, planted, replace
from support.time_limits import PATIENCE_SECONDS

from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.running_batch import RunningBatch
from lineclear.scheduler.flight_recorder import recorder, replay
from lineclear.scheduler.flight_recorder.recorder import KEY_BYTES, RecordingScheduler
from lineclear.scheduler.flight_recorder.recording_files import RecordingFiles, write

MARKS = (77001, 77002, 77003)
"""Tokens that no other field contains."""


class RecordingHarness(CoreHarness):
    """A harness with a recording core."""

    def __init__(self, max_records: int, num_blocks: int = 64) -> None:
        super().__init__(worker_vocab_size=80_000, worker_num_blocks=num_blocks, worker_max_model_len=4 * num_blocks)
        self.core = self.recorded = RecordingScheduler(
            CoreLimits(pipeline_depth=1, cache_secret=b"hidden"), max_records
        )
        self.join()


def recorded(max_records: int = 4096, requests: int = 12) -> RecordingHarness:
    """Return a harness after some requests."""
    harness = RecordingHarness(max_records)
    for number in range(requests):
        harness.submit(f"secret-name-{number}", MARKS * 4, max_tokens=5, eos=MARKS[0], cache_salt=b"tenant")
        harness.run()
    harness.submit("last", MARKS * 3, max_tokens=50)
    harness.step()
    return harness


def test_recording_has_no_content(tmp_path: Path) -> None:
    harness = recorded()
    write(tmp_path / "flight.jsonl", harness.recorded.recording())
    text = (tmp_path / "flight.jsonl").read_text()
    assert len(text.splitlines()) > 100
    for mark in (*map(str, MARKS), "secret-name", "last", b"hidden".hex(), b"tenant".hex(), "hidden", "tenant"):
        assert mark not in text, mark
    outputs = {str(token) for number in range(12) for token in harness.outputs(f"secret-name-{number}")}
    assert not any(f"{token}," in text or f"{token}]" in text for token in outputs if len(token) == 5)


@pytest.mark.parametrize("max_records", [10, 50])
def test_recording_is_bounded_and_replays_from_middle(max_records: int) -> None:
    harness = recorded(max_records, requests=100)
    entries = [json.loads(json.dumps(entry)) for entry in harness.recorded.recording()]
    assert max_records <= len(entries) - 2 <= 2 * max_records
    assert replay.replay(entries) == len(entries) - 2


def test_recording_of_long_prompt_is_little_more_than_keys() -> None:
    harness, length = RecordingHarness(4096, num_blocks=1500), 4000
    tracemalloc.start()
    try:
        for number in range(10):
            harness.submit(str(number), range(number, number + length), max_tokens=2)
            harness.run()
            harness.plans.clear()
        taken = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, recorder.__file__)])
    finally:
        tracemalloc.stop()
    keys = 10 * length // 4 * KEY_BYTES
    assert keys < sum(trace.size for trace in taken.traces) < 2 * keys
    entries = [json.loads(json.dumps(entry)) for entry in harness.recorded.recording()]
    assert replay.replay(entries) == len(entries) - 2


def test_recording_files_are_private_and_rotate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harness, directory = recorded(), tmp_path / "recordings"
    recordings = RecordingFiles(harness.recorded, directory)
    names = []
    for _ in range(6):
        path = recordings.write("a test").result(PATIENCE_SECONDS)
        names.append(path.name)
        assert path.stat().st_mode & 0o777 == 0o600
    assert names == [f"flight-{i}.jsonl" for i in (0, 1, 2, 3, 0, 1)]
    assert directory.stat().st_mode & 0o777 == 0o700
    assert len(list(directory.iterdir())) == 4
    assert replay.main([str(directory / names[0])]) == 0
    assert "every decision the same" in capsys.readouterr().out


def test_anomalies_in_a_row_write_one_file(tmp_path: Path) -> None:
    recordings = RecordingFiles(recorded().recorded, tmp_path / "recordings")
    for reason in ("first", "second"):
        recordings.dump(reason)
        recordings.wait()
    assert len(list((tmp_path / "recordings").iterdir())) == 1
    assert recordings.write("requested").result(PATIENCE_SECONDS).name == "flight-1.jsonl"


def test_directory_readable_by_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    recordings = RecordingFiles(recorded().recorded, tmp_path)
    with pytest.raises(OSError, match="0700"):
        recordings.write("a test").result(PATIENCE_SECONDS)
    assert list(tmp_path.iterdir()) == []


def test_replay_finds_a_core_that_decides_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harness = RecordingHarness(4096)
    for number in range(6):
        harness.submit(f"r{number}", 9 + number, max_tokens=9)
    harness.run()
    path = tmp_path / "flight.jsonl"
    write(path, harness.recorded.recording())
    assert replay.main([str(path)]) == 0
    with planted(Bug("it takes other slots", RunningBatch, replace("heapq.heappop(_1)", "_1.pop()"))):
        assert replay.main([str(path)]) == 1
    assert "recorded" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "{", "[]", "7", '{"format": 1}', '{"format": "lineclear flight recording 8"}'])
def test_other_file_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    assert replay.main([str(path)]) == 2
    assert replay.main([]) == 2
