"""Answers that never stop being asked for, each compared field by field with the only right one."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from campaigns.questions import Answer, Ask, Question

from lineclear.client import Client, Delta, Generation
from lineclear.errors import LineclearError, UnknownRequest


@dataclass(frozen=True)
class Tolerance:
    """How far an answer may be from the right one. The toy and fp32 leave no room for tokens."""

    logprob: float = 0.0
    """Of log probabilities."""
    tie: float = 0.0
    """Of the two most likely tokens either may be chosen when their log probabilities are nearer than this."""


@dataclass
class Tally:
    """What came of the answers. Written by many threads, under `lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    answers: int = 0
    tokens: int = 0
    lost: int = 0
    duplicated: int = 0
    altered: int = 0
    resumes: int = 0
    forgotten: int = 0
    """Submitted requests that a killed server knew, and that were submitted again."""
    routes: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    """Answers by what else of them was not right: their text, their end, their log probabilities."""
    failed: Counter[str] = field(default_factory=Counter)
    tied: list[Complete] = field(default_factory=list)
    """Answers that took the other of two nearly equal tokens: `ties` compares them with another right answer."""

    @property
    def is_clean(self) -> bool:
        """Nothing was lost, repeated, changed or refused."""
        return not (self.lost or self.duplicated or self.altered or self.wrong or self.failed)

    def compare(self, done: Complete, right: Answer, tolerance: Tolerance) -> None:
        """Count how a complete answer differs from the right one. Under `lock`."""
        tokens, answer = done.reading.tokens, done.answer
        self.lost += max(0, len(right.token_ids) - len(tokens))
        self.duplicated += max(0, len(tokens) - len(right.token_ids))
        self.altered += sum(a != b for a, b in zip(tokens, right.token_ids, strict=False))
        self.ends[answer.finish_reason.value] += 1
        self.wrong.update({*done.reading.problems, *differences(right, answer, tolerance)})
        self.wrong["tokens of the result"] += tuple(tokens) != answer.token_ids
        # What a listener to a submitted request gets may begin inside a character.
        self.wrong["pieces of text"] += done.question.route != "submit" and done.reading.text != answer.text
        self.wrong = +self.wrong


class Reader(threading.Thread):
    """Asks one question after another until told to stop, each to its end, on the route the question names."""

    def __init__(
        self,
        clients: Mapping[str, Client],
        ask: Ask,
        tally: Tally,
        *,
        tolerance: Tolerance | None = None,
        may_forget: bool = False,
    ) -> None:
        """`clients` are by route; `may_forget`: a server that is killed takes submitted requests with it."""
        super().__init__(daemon=True)
        self.num_tokens = 0
        """So far, over all answers."""
        self.last_at = 0.0
        """When the last token came."""
        self.busy_with: Question | None = None
        self._clients, self._ask, self._tally = clients, ask, tally
        self._tolerance, self._may_forget = tolerance or Tolerance(), may_forget
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Finish the answer in progress, and no further one."""
        self._stopped.set()

    def run(self) -> None:
        """Read."""
        while not self._stopped.is_set():
            self.busy_with = question = self._ask()
            reading = Pieces()
            try:
                got = (
                    self._submitted(question, reading) if question.route == "submit" else self._read(question, reading)
                )
                self._count(question, reading, got, "")
            except LineclearError as failure:
                self._count(question, reading, None, failure.reason)
            except Exception as error:  # a reader that died must not look like one that is patient
                self._count(question, reading, None, f"{type(error).__name__}: {error}")
        self.busy_with = None

    def _read(self, question: Question, reading: Pieces) -> Generation:
        client = self._clients[question.route]
        with client.stream(list(question.prompt), question.sampling, **question.params) as stream:
            self._follow(stream, reading)
        return stream.result

    def _submitted(self, question: Question, reading: Pieces) -> Generation:
        """Submit, listen to the beginning, hang up, listen from there on, and compare with what is kept."""
        client = self._clients[question.route]
        while True:
            try:
                kept = client.submit(list(question.prompt), question.sampling, **question.params)
                with kept.attach() as stream:
                    self._follow(stream, reading, most=len(question.right.token_ids) // 2)
                # What came may end anywhere: `result` has the text from the first token on.
                with kept.attach(len(reading.tokens)) as stream:
                    self._follow(stream, reading)
                got = kept.result()
                known = kept.poll()
                if (known.token_ids, known.text) != (got.token_ids, got.text):
                    reading.problems.append("poll")
                kept.cancel()
                return got
            except UnknownRequest:
                if not self._may_forget:
                    raise
                with self._tally.lock:
                    self._tally.forgotten += 1
                reading.begin_again()

    def _follow(self, deltas: Iterable[Delta], reading: Pieces, most: int | None = None) -> None:
        for delta in deltas:
            reading.take(delta)
            if delta.token_ids:
                self.num_tokens += len(delta.token_ids)
                self.last_at = time.monotonic()
            if most is not None and len(reading.tokens) >= most:
                return

    def _count(self, question: Question, reading: Pieces, got: Generation | None, error: str) -> None:
        tally = self._tally
        with tally.lock:
            tally.answers += 1
            tally.tokens += len(reading.tokens)
            tally.routes[question.route] += 1
            tally.lost += reading.lost
            tally.duplicated += reading.duplicated
            if got is None:
                tally.failed[error] += 1
                tally.altered += not _is_beginning(reading.tokens, question.right, self._tolerance)
                return
            tally.resumes += got.resumes
            done = Complete(question, reading, Answer.of(got))
            if find_tie(question.right, reading.tokens, self._tolerance) is None:
                tally.compare(done, question.right, self._tolerance)
            else:
                tally.tied.append(done)


def _is_beginning(tokens: Sequence[int], right: Answer, tolerance: Tolerance) -> bool:
    """Whether an answer that failed was right as far as it came; nothing is known of what follows a tie."""
    return tuple(tokens) == right.token_ids[: len(tokens)] or find_tie(right, tokens, tolerance) is not None


def find_tie(right: Answer, tokens: Sequence[int], tolerance: Tolerance) -> int | None:
    """Return where `tokens` first differ from the right ones, if they took the other of two nearly equal tokens."""
    at = next((i for i, (a, b) in enumerate(zip(tokens, right.token_ids, strict=False)) if a != b), None)
    return at if at is not None and is_tie(right, at, tokens[at], tolerance) else None


def is_tie(right: Answer, at: int, token: int, tolerance: Tolerance) -> bool:
    """Whether `token` may stand at `at` for the token of the right answer, which asked for the two most likely."""
    if tolerance.tie <= 0 or len(right.logprobs) <= at or len(right.logprobs[at][1]) < 2:
        return False
    (best, first), (second, other) = right.logprobs[at][1][:2]
    return {token, right.token_ids[at]} == {best, second} and first - other < tolerance.tie


def differences(right: Answer, got: Answer, tolerance: Tolerance) -> list[str]:
    """Which fields of an answer are not right, but for its tokens."""
    found = [name for name in ("text", "finish_reason", "matched_stop") if getattr(right, name) != getattr(got, name)]
    if len(right.logprobs) != len(got.logprobs) or not all(
        abs(a[0] - b[0]) <= tolerance.logprob and _same_top(a[1], b[1], tolerance)
        for a, b in zip(right.logprobs, got.logprobs, strict=True)
    ):
        found.append("logprobs")
    return found


def _same_top(right: Sequence[tuple[int, float]], got: Sequence[tuple[int, float]], tolerance: Tolerance) -> bool:
    """Whether candidates are the same. With a tolerance, those that are nearly equal may change places."""
    if tolerance.logprob == 0 or not right:
        return tuple(right) == tuple(got)
    known, come = dict(right), dict(got)
    if len(come) != len(got) or len(got) != len(right) or list(got) != sorted(got, key=lambda entry: -entry[1]):
        return False
    # A candidate of one list alone is below the other list's end, or near it.
    bounds = min(known.values()) + tolerance.logprob, min(come.values()) + tolerance.logprob
    return all(
        abs(known[token] - come[token]) <= tolerance.logprob
        if token in known and token in come
        else (known.get(token, bounds[1]) <= bounds[1] and come.get(token, bounds[0]) <= bounds[0])
        for token in known | come
    )


class Pieces:
    """The pieces of one answer as they come."""

    def __init__(self) -> None:
        self.begin_again()

    def begin_again(self) -> None:
        """Forget all."""
        self.tokens: list[int] = []
        self.text = ""
        self.lost = self.duplicated = 0
        self.problems: list[str] = []

    def take(self, delta: Delta) -> None:
        """Note a piece."""
        self.duplicated += max(0, len(self.tokens) - delta.first_index)
        self.lost += max(0, delta.first_index - len(self.tokens))
        self.tokens += delta.token_ids
        self.text += delta.text
        if delta.logprobs and len(delta.logprobs) != len(delta.token_ids):
            self.problems.append("logprobs of a piece")


@dataclass(frozen=True)
class Complete:
    """An answer that came to its end: what was asked, its pieces as they came, and the whole."""

    question: Question
    reading: Pieces
    answer: Answer
