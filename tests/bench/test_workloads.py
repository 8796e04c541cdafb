"""The workloads are what their page says, today and next year: figures of different days are of the same requests."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from bench.workloads import KINDS, PREFIX_TOKENS, Workload, make, read, save


def digest(workload: Workload) -> str:
    """Of every id, length and arrival."""
    jobs = repr([(j.id, j.prompt, j.max_tokens, j.arrival_seconds) for j in workload.jobs])
    return hashlib.sha256(jobs.encode()).hexdigest()[:16]


def any_rate(kind: str) -> float:
    return 3.9 if kind == "w3" else 0.0


DIGESTS = {
    "w1": "1c02245e599dad7d", "w2": "67f27c6bc8f07890", "w3": "696a3d74cdb66f45", "w4": "123abec75d710f4b",
    "w5": "666c01c8683ae905",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_requests_are_stable(kind: str) -> None:
    assert digest(make(kind, 16, rate=any_rate(kind))) == DIGESTS[kind]


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("w4", "w5")])
def test_fewer_requests_are_a_prefix_of_more(kind: str) -> None:
    assert make(kind, 10, rate=any_rate(kind)).jobs == make(kind, 30, rate=any_rate(kind)).jobs[:10]


def test_seed_changes_the_requests() -> None:
    ours, theirs = make("w1", 8), make("w1", 8, seed=5)
    assert all(a.prompt != b.prompt for a, b in zip(ours.jobs, theirs.jobs, strict=True))


def test_w2_is_w1_behind_one_prefix() -> None:
    plain, prefixed = make("w1", 8).jobs, make("w2", 8).jobs
    (prefix,) = {job.prompt[:PREFIX_TOKENS] for job in prefixed}
    assert len(prefix) == PREFIX_TOKENS
    assert [job.prompt[PREFIX_TOKENS:] for job in prefixed] == [job.prompt for job in plain]


def test_w3_is_w1_at_the_requested_rate() -> None:
    jobs = make("w3", 400, rate=4.0).jobs
    arrivals = [job.arrival_seconds for job in jobs]
    assert arrivals == sorted(arrivals)
    assert 85 <= arrivals[-1] <= 115  # 100 s, with a standard deviation of 5
    assert [job.prompt for job in jobs] == [job.prompt for job in make("w1", 400).jobs]


@pytest.mark.parametrize(("kind", "rate"), [("w3", 0.0), ("w9", 0.0)])
def test_invalid_workloads_are_refused(kind: str, rate: float) -> None:
    with pytest.raises(ValueError, match=r"w3 needs|there is no workload"):
        make(kind, 4, rate=rate)


def test_workload_round_trips_through_a_file(tmp_path: Path) -> None:
    workload = make("w3", 5, rate=2.0)
    save(workload, tmp_path / "w.json")
    assert read(tmp_path / "w.json") == workload
