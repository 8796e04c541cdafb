"""Readers that request answers in a loop and compare each field with the expected answer."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from campaigns.pauses import Timeline
from campaigns.questions import Answer, Ask, Question

from lineclear.client import Client, Delta, Generation
from lineclear.errors import LineclearError, UnknownRequest


@dataclass(frozen=True)
class Tolerance:
    """How far an answer may differ from the expected one. The toy worker and fp32 allow no other tokens."""

    logprob: float = 0.0
    """Largest difference of log probabilities."""
    tie: float = 0.0
    """Either of the two most likely tokens is allowed if their log probabilities differ by less than this."""


@dataclass
class Tally:
    """Counts of answers and errors. Many threads write it under `lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    answers: int = 0
    tokens: int = 0
    lost: int = 0
    duplicated: int = 0
    altered: int = 0
    resumes: int = 0
    forgotten: int = 0
    """Submitted requests that a killed server lost, and that were submitted again."""
    routes: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    """Answers by the field that was wrong: text, finish reason, log probabilities."""
    failed: Counter[str] = field(default_factory=Counter)
    timelines: list[Timeline] = field(default_factory=list)
    """Of complete answers that were read in one piece."""
    tied: list[Complete] = field(default_factory=list)
    """Answers that took the other of two nearly equal tokens. `ties.settle` compares them later."""

    @property
    def is_clean(self) -> bool:
        """Whether no answer was lost, repeated, changed or refused."""
        return not (self.lost or self.duplicated or self.altered or self.wrong or self.failed)

    def compare(self, done: Complete, right: Answer, tolerance: Tolerance) -> None:
        """Count the differences between a complete answer and the expected one. The caller holds `lock`."""
        tokens, answer = done.received.tokens, done.answer
        self.lost += max(0, len(right.token_ids) - len(tokens))
        self.duplicated += max(0, len(tokens) - len(right.token_ids))
        self.altered += sum(a != b for a, b in zip(tokens, right.token_ids, strict=False))
        self.ends[answer.finish_reason.value] += 1
        self.wrong.update({*done.received.problems, *differences(right, answer, tolerance)})
        self.wrong["tokens of the result"] += tuple(tokens) != answer.token_ids
        # A client that attaches may start inside a character.
        self.wrong["pieces of text"] += done.question.route != "submit" and done.received.text != answer.text
        self.wrong = +self.wrong


class Reader(threading.Thread):
    """Request one answer after another until `stop`, each to its end, on the route that the question names."""

    def __init__(
        self,
        clients: Mapping[str, Client],
        ask: Ask,
        tally: Tally,
        *,
        tolerance: Tolerance | None = None,
        may_forget: bool = False,
    ) -> None:
        """`clients` has a client for each route. `may_forget`: a killed server loses submitted requests."""
        super().__init__(daemon=True)
        self.num_tokens = 0
        """Tokens of all answers so far."""
        self.last_at = 0.0
        """Time of the last token."""
        self.busy_with: Question | None = None
        self._times: list[float] = []  # of the tokens of this answer
        self._clients, self._ask, self._tally = clients, ask, tally
        self._tolerance, self._may_forget = tolerance or Tolerance(), may_forget
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Stop after the answer in progress."""
        self._stopped.set()

    def run(self) -> None:
        """Request answers until `stop`."""
        while not self._stopped.is_set():
            self.busy_with = question = self._ask()
            received = ReceivedAnswer()
            self._times = []
            try:
                got = (
                    self._submitted(question, received)
                    if question.route == "submit"
                    else self._read(question, received)
                )
                self._count(question, received, got, "")
            except LineclearError as failure:
                self._count(question, received, None, failure.reason)
            except Exception as error:  # a reader that crashed must not look like one that waits
                self._count(question, received, None, f"{type(error).__name__}: {error}")
        self.busy_with = None

    def _read(self, question: Question, received: ReceivedAnswer) -> Generation:
        client = self._clients[question.route]
        with client.stream(list(question.prompt), question.sampling, **question.params) as stream:
            self._follow(stream, received)
        return stream.result

    def _submitted(self, question: Question, received: ReceivedAnswer) -> Generation:
        """Submit, attach, detach, attach again, and compare with the stored result."""
        client = self._clients[question.route]
        while True:
            try:
                kept = client.submit(list(question.prompt), question.sampling, **question.params)
                with kept.attach() as stream:
                    self._follow(stream, received, most=len(question.right.token_ids) // 2)
                # The first attach may end anywhere; `result` has the whole text.
                with kept.attach(len(received.tokens)) as stream:
                    self._follow(stream, received)
                got = kept.result()
                known = kept.poll()
                if (known.token_ids, known.text) != (got.token_ids, got.text):
                    received.problems.append("poll")
                kept.cancel()
                return got
            except UnknownRequest:
                if not self._may_forget:
                    raise
                with self._tally.lock:
                    self._tally.forgotten += 1
                received.restart()

    def _follow(self, deltas: Iterable[Delta], received: ReceivedAnswer, most: int | None = None) -> None:
        for delta in deltas:
            received.add(delta)
            if delta.token_ids:
                self.num_tokens += len(delta.token_ids)
                self.last_at = time.monotonic()
                self._times.append(self.last_at)
            if most is not None and len(received.tokens) >= most:
                return

    def _count(self, question: Question, received: ReceivedAnswer, got: Generation | None, error: str) -> None:
        tally = self._tally
        with tally.lock:
            tally.answers += 1
            tally.tokens += len(received.tokens)
            tally.routes[question.route] += 1
            tally.lost += received.lost
            tally.duplicated += received.duplicated
            if got is None:
                tally.failed[error] += 1
                tally.altered += not _is_prefix(received.tokens, question.right, self._tolerance)
                return
            tally.resumes += got.resumes
            if question.route != "submit" and not got.resumes:
                tally.timelines.append(Timeline(tuple(self._times), got.timings.recoveries))
            done = Complete(question, received, Answer.of(got))
            if find_tie(question.right, received.tokens, self._tolerance) is None:
                tally.compare(done, question.right, self._tolerance)
            else:
                tally.tied.append(done)


def _is_prefix(tokens: Sequence[int], right: Answer, tolerance: Tolerance) -> bool:
    """Whether the tokens of a failed answer are a prefix of the expected ones, up to a tie."""
    return tuple(tokens) == right.token_ids[: len(tokens)] or find_tie(right, tokens, tolerance) is not None


def find_tie(right: Answer, tokens: Sequence[int], tolerance: Tolerance) -> int | None:
    """Return the first index where `tokens` differ from the expected ones, if that is a tie."""
    at = next((i for i, (a, b) in enumerate(zip(tokens, right.token_ids, strict=False)) if a != b), None)
    return at if at is not None and is_tie(right, at, tokens[at], tolerance) else None


def is_tie(right: Answer, at: int, token: int, tolerance: Tolerance) -> bool:
    """Whether `token` is allowed at index `at`: one of two nearly equal candidates."""
    if tolerance.tie <= 0 or len(right.logprobs) <= at or len(right.logprobs[at][1]) < 2:
        return False
    (best, first), (second, other) = right.logprobs[at][1][:2]
    return {token, right.token_ids[at]} == {best, second} and first - other < tolerance.tie


def differences(right: Answer, got: Answer, tolerance: Tolerance) -> list[str]:
    """Return the names of the fields that differ, except for the tokens."""
    found = [name for name in ("text", "finish_reason", "matched_stop") if getattr(right, name) != getattr(got, name)]
    if len(right.logprobs) != len(got.logprobs) or not all(
        abs(a[0] - b[0]) <= tolerance.logprob and _same_top(a[1], b[1], tolerance)
        for a, b in zip(right.logprobs, got.logprobs, strict=True)
    ):
        found.append("logprobs")
    return found


def _same_top(right: Sequence[tuple[int, float]], got: Sequence[tuple[int, float]], tolerance: Tolerance) -> bool:
    """Whether the candidates are equal. With a tolerance, nearly equal ones may change places."""
    if tolerance.logprob == 0 or not right:
        return tuple(right) == tuple(got)
    known, come = dict(right), dict(got)
    if len(come) != len(got) or len(got) != len(right) or list(got) != sorted(got, key=lambda entry: -entry[1]):
        return False
    # A candidate of only one list is below the other list's last entry, or close to it.
    bounds = min(known.values()) + tolerance.logprob, min(come.values()) + tolerance.logprob
    return all(
        abs(known[token] - come[token]) <= tolerance.logprob
        if token in known and token in come
        else (known.get(token, bounds[1]) <= bounds[1] and come.get(token, bounds[0]) <= bounds[0])
        for token in known | come
    )


class ReceivedAnswer:
    """The messages of one answer, joined."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start over."""
        self.tokens: list[int] = []
        self.text = ""
        self.lost = self.duplicated = 0
        self.problems: list[str] = []

    def add(self, delta: Delta) -> None:
        """Add the tokens and text of `delta`."""
        self.duplicated += max(0, len(self.tokens) - delta.first_index)
        self.lost += max(0, delta.first_index - len(self.tokens))
        self.tokens += delta.token_ids
        self.text += delta.text
        if delta.logprobs and len(delta.logprobs) != len(delta.token_ids):
            self.problems.append("logprobs of a piece")


@dataclass(frozen=True)
class Complete:
    """A complete answer: its question, the joined messages and the result."""

    question: Question
    received: ReceivedAnswer
    answer: Answer
