"""Short runs of the campaigns, and checks that they detect planted errors."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from campaigns import chaos, growth, hostile, pauses, privacy, questions, rolling, soak
from campaigns.answers import CheckingReader, Tally, differences
from campaigns.pauses import Death, Pauses, Timeline
from campaigns.questions import Answer
from campaigns.server import is_orphan

from lineclear.client import Client, Delta, FinishReason, Generation, Output, Sampling, TokenLogprobs
from lineclear.client.message_classes import Started, Timings, Usage


@pytest.mark.parametrize(("of", "kills"), [("worker", 4), ("scheduler", 1)])
def test_clients_notice_no_kill(folder: Path, of: str, kills: int) -> None:
    deaths = {"kill": 0.5, "term": 0.5}
    done = chaos.campaign(folder, of=of, kills=kills, streams=9, seed=3, deaths=deaths)
    assert done.is_clean, done.figures()
    assert done.tally.answers >= 9
    assert done.tally.routes.keys() == {"generate", "session", "submit"}
    assert done.tally.ends.keys() >= {"length", "stop_string"}
    assert len(done.recovered) == kills
    assert (done.tally.resumes > 0) == (of == "scheduler")


def test_clients_notice_no_kill_of_one_of_two_workers(folder: Path) -> None:
    deaths = {"kill": 0.7, "term": 0.3}
    done = chaos.campaign(folder, of="worker", kills=4, streams=9, seed=3, num_workers=2, deaths=deaths)
    assert done.is_clean, done.figures()
    assert done.continued_elsewhere > 0
    assert done.figures()["living_stream_pause_seconds"]


class _Scripted:
    """A client whose only answer arrives in these pieces."""

    def __init__(self, pieces: Sequence[Delta], reason: FinishReason) -> None:
        self._pieces = pieces
        parts: dict[str, Any] = {"usage": Usage(), "timings": Timings(), "started": Started(), "index": 0}
        parts["token_ids"] = tuple(token for piece in pieces for token in piece.token_ids)
        parts["logprobs"] = tuple(entry for piece in pieces for entry in piece.logprobs)
        text = "".join(piece.text for piece in pieces)
        self.result = Generation.of([Output(text=text, finish_reason=reason, matched_stop=None, **parts)])

    @contextmanager
    def stream(self, *_: object, **__: object) -> Iterator[_Scripted]:
        yield self

    def __iter__(self) -> Iterator[Delta]:
        return iter(self._pieces)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda piece: [piece], ""),
        (lambda piece: [], "lost"),
        (lambda piece: [replace(piece, token_ids=piece.token_ids * 2)], "duplicated"),
        (lambda piece: [replace(piece, token_ids=(piece.token_ids[0] ^ 1,))], "altered"),
        (lambda piece: [replace(piece, text=piece.text[:-1])], "text"),
        (lambda piece: [replace(piece, logprobs=(TokenLogprobs(piece.logprobs[0].logprob - 0.01),))], "logprobs"),
    ],
    ids=["right", "lost", "repeated", "altered", "text", "logprob"],
)
def test_one_wrong_message_is_found(change: Callable[[Delta], list[Delta]], found: str) -> None:
    sampling = Sampling(seed=1, max_tokens=30, ignore_eos=True)
    right = questions.toy_answer((5, 6, 7), sampling, 0)
    logprobs = [TokenLogprobs(logprob) for logprob, _ in right.logprobs]
    pieces = [Delta("", (token,), i, (logprobs[i],)) for i, token in enumerate(right.token_ids)]
    pieces[9:10] = change(replace(pieces[9], text=right.text))
    tally, client = Tally(), cast("Client", _Scripted(pieces, right.finish_reason))
    question = questions.Question((5, 6, 7), sampling, right, top_logprobs=0)
    CheckingReader({"generate": client}, lambda: question, tally).ask()
    assert tally.answers == 1
    assert tally.is_clean == (not found), tally.bad
    assert not found or getattr(tally, found, tally.wrong[found]) > 0, tally.bad


def test_idle_campaign_is_not_clean() -> None:
    idle = chaos.Campaign("", lambda: pytest.fail("no server"), questions.toy_questions(3), 0, random.Random(3), {})
    assert idle.missing() == ["generate", "session", "submit", "deaths", "recoveries"]
    assert not idle.is_clean


def test_every_answer_field_is_compared() -> None:
    right = questions.toy_answer((5, 6, 7), Sampling(seed=1, max_tokens=30, stop="never"), 2)
    assert differences(right, right, 0.0) == []
    logprob, top = right.logprobs[3]
    for field, value in (
        ("text", right.text[:-1]),
        ("finish_reason", FinishReason.STOP_EOS),
        ("matched_stop", "never"),
        ("logprobs", right.logprobs[:-1]),
        ("logprobs", (*right.logprobs[:3], (logprob - 0.01, top), *right.logprobs[4:])),
        ("logprobs", (*right.logprobs[:3], (logprob, top[::-1]), *right.logprobs[4:])),
    ):
        assert differences(right, replace(right, **{field: value}), 0.0) == [field]


def test_only_near_candidates_may_swap() -> None:
    def answer(*top: tuple[int, float]) -> Answer:
        return Answer((4,), "", FinishReason.LENGTH, None, ((-0.7, top),))

    right = answer((4, -0.7), (9, -1.5), (3, -2.0))
    assert differences(right, answer((4, -0.7), (9, -1.55), (3, -1.95)), 0.1) == []
    assert differences(right, answer((4, -0.7), (9, -1.5), (8, -2.05)), 0.1) == []
    for wrong in (
        answer((4, -0.7), (8, -1.5), (3, -2.0)),  # another candidate, far from the end of the list
        answer((4, -0.7), (3, -1.5), (9, -2.0)),
        answer((4, -0.7), (9, -1.5)),
        answer((4, -0.7), (4, -1.5), (3, -2.0)),
        answer((9, -1.5), (4, -0.7), (3, -2.0)),
    ):
        assert differences(right, wrong, 0.1) == ["logprobs"]


def test_first_complete_stop_string_ends_the_answer() -> None:
    """The expected answer is computed independently: character by character."""
    sampling = Sampling(seed=4, max_tokens=60, ignore_eos=True)
    whole = questions.toy_answer((9, 9), sampling, None)
    assert whole.finish_reason is FinishReason.LENGTH
    text = whole.text
    plain = next(i for i in range(10, len(text) - 4) if text[i : i + 2].isascii() and text.find(text[i : i + 2]) == i)
    stop = text[plain : plain + 2]
    cut = questions.toy_answer((9, 9), sampling.replace(stop=("zzzzzz", stop)), None)
    assert (cut.text, cut.matched_stop) == (text[:plain], stop)
    assert len(cut.token_ids) < len(whole.token_ids)
    late = questions.toy_answer((9, 9), sampling.replace(stop=stop, min_tokens=60), None)
    assert late.finish_reason is FinishReason.LENGTH or text.endswith(stop)


def test_short_soak_is_clean(folder: Path) -> None:
    keepalive = ["--keepalive-time-seconds", "2", "--keepalive-timeout-seconds", "2"]
    found = soak.soak(folder, seconds=6.0, streams=4, seed=5, kill_seconds=2.0, vanish_seconds=1.5, flags=keepalive)
    assert soak.faults(found, growth.SHORT, certain=True) == [], found
    assert found["answers"] > 10
    assert 0 < found["canary_gap_seconds"]["p50"] <= found["canary_gap_seconds"]["max"]
    assert found["worker"]["processes"] > 1


_FAULTY = """
import itertools, os, sys, threading
from campaigns.memory_probe import main
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.grpc_api.response_writer import ResponseWriter

submit, write, kept, numbers = Scheduler.submit, ResponseWriter.write, [], itertools.count(1)

def leaking(self, request, now):
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    kept.append((os.dup(2), b"x" * 800_000, thread))
    return submit(self, request, now)

async def altering(self, message):
    if getattr(message, "token_ids", ()) and next(numbers) % 10 == 0:
        message.token_ids[-1] ^= 1
    await write(self, message)

Scheduler.submit, ResponseWriter.write = leaking, altering
sys.exit(main(sys.argv[1:]))
"""


def test_short_soak_finds_leaks_and_wrong_answers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "CODE", _FAULTY)
    found = soak.soak(folder, seconds=4.0, streams=4, seed=5, kill_seconds=1000.0, vanish_seconds=1000.0)
    assert found["missing"] == ["vanish", "kill"]
    assert any("canary" in problem for problem in found["problems"])
    leaks = {f"scheduler {name}" for name in ("in_use_mib", "private_mib", "threads", "descriptors")}
    faults = {*soak.faults(found, growth.SHORT, certain=True)}
    assert faults >= {"missing", "altered", "problems", *leaks}, found
    assert faults <= {"missing", "altered", "problems", "wrong", "failed", "duplicated", "lost", *leaks}, found


def test_slope_separates_leak_from_noise() -> None:
    rng = random.Random(1)
    leak = [(n * 100.0, n * 100.0 * 40 + rng.uniform(-1e6, 1e6)) for n in range(500)]
    rise, error = growth.slope(leak)
    assert rise - error < 40 < rise + error
    assert 100_000 * (rise - error) > 2**20
    noise = [(n * 1000.0, rng.uniform(-1e5, 1e5)) for n in range(500)]
    rise, error = growth.slope(noise)
    assert 100_000 * (rise + error) < 2**20


def test_successive_processes_share_a_slope() -> None:
    lives = [[(float(x), 1e9 * life + 3.0 * x) for x in range(100 * life, 100 * life + 50)] for life in range(4)]
    rise, error = growth.slope(*lives)
    assert rise == pytest.approx(3.0)
    assert error == pytest.approx(0.0, abs=1e-6)
    assert growth.slope()[1] == float("inf")


def test_unknown_slope_is_too_much_unless_certain() -> None:
    few = [growth.Sample(n, 100.0 + n / 1e6, 4, 20, pid=1) for n in range(3)]
    found = growth.growth(few)
    assert growth.too_much(found, growth.Bounds()) == ["private_mib", "threads", "descriptors"]
    assert growth.too_much(found, growth.Bounds(), certain=True) == []


def test_own_cached_prompt_is_faster(folder: Path) -> None:
    """The measurement works. The other tenant's times need hundreds of trials and a quiet machine; CI counts work
    instead, in security/test_cache_privacy.py.
    """
    figures = privacy.campaign(folder, trials=16, seed=2)
    assert figures["median_ms"]["own"] < figures["median_ms"]["new"], figures
    assert figures["trials"]["new"] + figures["trials"]["shared"] == figures["trials"]["own"] == 16


def test_area_is_the_probability_of_a_right_guess() -> None:
    assert privacy.area([1.0, 2.0], [3.0, 4.0]) == 1.0
    assert privacy.area([1.0, 3.0], [2.0, 3.0]) == 0.625
    assert privacy.separability([3.0, 4.0], [1.0, 2.0]) == 1.0
    rng = random.Random(4)
    same = [[rng.gauss(5, 1) for _ in range(400)] for _ in range(2)]
    assert privacy.separability(*same) <= privacy.MAX_AREA
    assert privacy.separability(same[0], [value + 0.5 for value in same[1]]) > privacy.MAX_AREA


def test_quantiles() -> None:
    assert pauses.quantiles([float(n) for n in range(1, 101)]) == {"p50": 51.0, "p99": 100.0, "max": 100.0}
    assert pauses.quantiles([]) == {}


def test_orphan_is_a_worker_without_scheduler() -> None:
    sleeper = "import time; time.sleep(60)"
    parent = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', "
        f"{sleeper!r}, *sys.argv[1:]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); print(child.pid)"
    )

    def orphan(*words: str) -> int:
        done = subprocess.run([sys.executable, "-c", parent, *words], capture_output=True, text=True, check=True)
        return int(done.stdout)

    worker, other = orphan("support.toy_worker_command"), orphan("another")
    try:
        assert is_orphan(worker)
        assert not is_orphan(other), "another process may have reused the pid"
    finally:
        for pid in (worker, other):
            os.kill(pid, signal.SIGKILL)


def test_canary_reads_beside_hostile_callers(folder: Path) -> None:
    campaign = hostile.Campaign(folder)
    try:
        for kind in ("calm", "detokenize_flood", "cancel_storm", "frames_of_resets"):
            found = campaign.run(kind, 0.5)
            assert hostile.faults(found) == [], json.dumps(found)
    finally:
        exit_code = campaign.end()
    assert exit_code == 0


def test_idle_callers_are_a_fault() -> None:
    found = {"kind": "detokenize_flood", "times": 9, "outcomes": {"OK": 1}, "callers_failed": 0, "answers": 1}
    found |= {"wrong": "", "stood_still": False}
    assert hostile.faults(found) == []
    for field, value, fault in (
        ("times", 0, "times"),
        ("outcomes", {"INVALID_ARGUMENT": 9}, "served"),
        ("callers_failed", 1, "callers_failed"),
        ("answers", 0, "answers"),
        ("stood_still", True, "stood_still"),
        ("wrong", "the canary's answer failed or differed", "wrong"),
    ):
        assert hostile.faults({**found, field: value}) == [fault]
    assert hostile.faults({**found, "kind": "cancel_storm", "outcomes": {}}) == []


def test_answers_are_of_one_model(folder: Path) -> None:
    done = rolling.campaign(folder, updates=2, streams=6, seed=3)
    assert done.is_clean, done.figures()
    assert len(done.tally.models) >= 2
    assert done.tally.changed > 0
    assert done.tally.restarts > 0


def test_answer_of_two_models_is_found() -> None:
    prompt, sampling = (5, 6), rolling.Sampling(seed=1)
    one, other = (rolling.expected(prompt, sampling, 20, 512, model) for model in ("m0", "m1"))
    mixed = [*one[:10], *other[10:]]
    assert rolling.is_prefix(rolling.Part("toym0", one[:10], rolling.text_of(one[:9]).rstrip("\ufffd")), one)
    assert not rolling.is_prefix(rolling.Part("toym0", mixed, ""), one)
    assert not rolling.is_prefix(rolling.Part("toym0", one, rolling.text_of(mixed)), one)


DEATH = Death(at=10.0, lost_at=10.2, is_kill=True)


def test_streams_are_told_apart_by_their_recoveries() -> None:
    killed = Timeline((9.0, 9.9, 10.5, 10.6), recoveries=1)
    living = Timeline((9.0, 9.95, 10.05, 10.15, 10.25, 12.0), recoveries=0)
    before = Timeline((7.0, 7.4, 7.6, 8.0), recoveries=0)
    found = Pauses.of([killed, living, before], [DEATH])
    assert [round(gap, 6) for gap in found.killed] == [0.6]
    assert [round(gap, 6) for gap in found.living] == [0.1]  # the gap to 12.0 is after the loss
    assert [round(gap, 6) for gap in found.control] == [0.4]  # those that overlap 7.5 to 7.7


def test_answers_that_span_two_deaths_are_not_counted() -> None:
    later = DEATH._replace(at=11.0, lost_at=11.1)
    found = Pauses.of([Timeline((9.0, 12.0), recoveries=1)], [DEATH, later])
    assert (found.killed, found.living, found.control) == ([], [], [])


def test_pauses_without_another_worker_are_told_apart() -> None:
    found = Pauses.of([Timeline((9.0, 9.9, 14.5), recoveries=1)], [DEATH._replace(was_only=True)])
    assert found.killed == []
    assert [round(gap, 6) for gap in found.killed_alone] == [4.6]


def test_only_kills_count_as_pauses_of_the_dead_worker() -> None:
    hung = DEATH._replace(is_kill=False)
    found = Pauses.of([Timeline((9.0, 12.0), 1), Timeline((9.0, 10.1, 10.3), 0)], [hung])
    assert found.killed == []
    assert len(found.living) == 1
