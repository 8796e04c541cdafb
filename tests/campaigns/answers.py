"""Readers that request answers in a loop and compare each field with the expected answer."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from campaigns.pauses import Timeline
from campaigns.questions import ROUTES, Answer, AskMixed, Call, Question

from lineclear.client import Client, Delta, Generation
from lineclear.errors import LineclearError, ServerStarting, UnknownRequest

_MAX_BAD = 20


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
    repeated: int = 0
    """Requests that a killed server lost and that the client does not resume; they were sent again."""
    routes: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    """Answers by the field that was wrong: text, finish reason, log probabilities."""
    failed: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    """Complete answers by feature."""
    bad_features: Counter[str] = field(default_factory=Counter)
    """Wrong or failed answers by feature."""
    bad: list[str] = field(default_factory=list)
    """The first wrong and failed answers."""
    accepted_tokens: int = 0
    preemptions: int = 0
    recovered: Counter[str] = field(default_factory=Counter)
    """Answers by feature that lost a worker at least once."""
    timelines: list[Timeline] = field(default_factory=list)
    """Of complete answers that were read in one piece."""

    @property
    def is_clean(self) -> bool:
        """Whether no answer was lost, repeated, changed or refused."""
        return not (self.lost or self.duplicated or self.altered or self.wrong or self.failed)

    @property
    def num_differences(self) -> int:
        """All lost, repeated, changed and refused parts so far."""
        return self.lost + self.duplicated + self.altered + self.wrong.total() + self.failed.total()

    def compare(self, done: Complete, right: Answer, tolerance: float) -> None:
        """Count the differences between a complete output and the expected one. The caller holds `lock`."""
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
        ask: AskMixed,
        tally: Tally,
        *,
        tolerance: float = 0.0,
        may_forget: bool = False,
    ) -> None:
        """`clients` has a client for each route. `may_forget`: a killed server loses submitted requests.

        Log probabilities may differ from the expected ones by `tolerance`.
        """
        super().__init__(daemon=True)
        self.num_tokens = 0
        """Tokens of all answers so far."""
        self.last_at = 0.0
        """Time of the last token."""
        self.busy_with: Question | Call | None = None
        self._times: list[float] = []  # of the tokens of this answer
        self._clients, self._ask, self._tally = clients, ask, tally
        self._tolerance, self._may_forget = tolerance, may_forget
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Stop after the answer in progress."""
        self._stopped.set()

    def run(self) -> None:
        """Request answers until `stop`."""
        while not self._stopped.is_set():
            self.busy_with = question = self._ask()
            if isinstance(question, Call):
                self._call(question)
            else:
                self._answer(question)
        self.busy_with = None

    def _answer(self, question: Question) -> None:
        received = ReceivedOutputs()
        self._times = []
        try:
            if question.route == "submit":
                got = self._submitted(question, received)
            elif question.arrives_whole:
                got = self._whole(question, received)
            else:
                got = self._read(question, received)
            self._count(question, received, got, "")
        except LineclearError as failure:
            self._count(question, received, None, failure.reason)
        except Exception as error:  # a reader that crashed must not look like one that waits
            self._count(question, received, None, f"{type(error).__name__}: {error}")

    def _read(self, question: Question, received: ReceivedOutputs) -> Generation:
        client = self._clients[question.route]
        with client.stream(list(question.prompt), question.sampling, **question.params) as stream:
            self._follow(stream, received)
        return stream.result

    def _whole(self, question: Question, received: ReceivedOutputs) -> Generation:
        """Read an answer that the client does not resume. Send it again if a killed server lost it."""
        while True:
            try:
                return self._read(question, received)
            except LineclearError as error:
                if not self._may_forget or error.code != "UNAVAILABLE":
                    raise
                with self._tally.lock:
                    self._tally.repeated += 1
                received.restart()

    def _submitted(self, question: Question, received: ReceivedOutputs) -> Generation:
        """Submit, attach, detach, attach again, and compare with the stored result."""
        client = self._clients[question.route]
        while True:
            try:
                kept = client.submit(list(question.prompt), question.sampling, **question.params)
                with kept.attach() as stream:
                    self._follow(stream, received, most=len(question.right.token_ids) // 2)
                # The first attach may end anywhere; `result` has the whole text.
                received.restart_others()
                with kept.attach(len(received.outputs[0].tokens)) as stream:
                    self._follow(stream, received)
                got = kept.result()
                known = kept.poll()
                if (known.token_ids, known.texts) != (got.token_ids, tuple(output.text for output in got.outputs)):
                    received.outputs[0].problems.append("poll")
                kept.cancel()
                return got
            except (UnknownRequest, ServerStarting):  # Submit and GetResult wait 30 s for a server
                if not self._may_forget:
                    raise
                with self._tally.lock:
                    self._tally.forgotten += 1
                received.restart()

    def _follow(self, deltas: Iterable[Delta], received: ReceivedOutputs, most: int | None = None) -> None:
        for delta in deltas:
            received.add(delta)
            if delta.token_ids:
                self._progress(len(delta.token_ids))
                self._times.append(self.last_at)
            if most is not None and len(received.outputs[0].tokens) >= most:
                return

    def _progress(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.last_at = time.monotonic()

    def _call(self, question: Call) -> None:
        tally, error = self._tally, ""
        while True:
            try:
                found = question.ask(self._clients[ROUTES[0]])
                break
            except LineclearError as failure:
                if not self._may_forget or failure.code != "UNAVAILABLE":
                    found, error = (), failure.reason
                    break
                with tally.lock:
                    tally.repeated += 1
            except Exception as failure:  # a reader that crashed must not look like one that waits
                found, error = (), f"{type(failure).__name__}: {failure}"
                break
        self._progress(1)
        near = len(found) == len(question.right) and all(
            _near(a, b, self._tolerance) for a, b in zip(found, question.right, strict=True)
        )
        with tally.lock, self._counting(question):
            tally.answers += 1
            tally.routes[question.route] += 1
            if error:
                tally.failed[error] += 1
            elif not near:
                tally.wrong[question.route] += 1

    def _count(self, question: Question, received: ReceivedOutputs, got: Generation | None, error: str) -> None:
        tally = self._tally
        with tally.lock, self._counting(question):
            tally.answers += 1
            tally.routes[question.route] += 1
            for output in received.outputs:
                tally.tokens += len(output.tokens)
                tally.lost += output.lost
                tally.duplicated += output.duplicated
            rights = (question.right, *question.others)
            if got is None:
                tally.failed[error] += 1
                pairs = zip(received.outputs, rights, strict=False)
                tally.altered += sum(tuple(o.tokens) != right.token_ids[: len(o.tokens)] for o, right in pairs)
                return
            tally.resumes += got.resumes
            tally.accepted_tokens += sum(output.timings.accepted_tokens for output in got.outputs)
            tally.preemptions += sum(output.timings.preemptions for output in got.outputs)
            if any(output.timings.recoveries for output in got.outputs):
                tally.recovered.update(question.features)
            if question.route != "submit" and not got.resumes and not question.arrives_whole:
                recoveries = max(output.timings.recoveries for output in got.outputs)
                tally.timelines.append(Timeline(tuple(self._times), recoveries, question.features))
            answers = Answer.all_of(got)
            if not len(answers) == len(received.outputs) == len(rights):
                tally.wrong["number of outputs"] += 1
                return
            for output, answer, right in zip(received.outputs, answers, rights, strict=True):
                tally.compare(Complete(question, output, answer), right, self._tolerance)

    @contextlib.contextmanager
    def _counting(self, question: Question | Call) -> Iterator[None]:
        """Count the differences that the block finds for the features of `question`. The caller holds the lock."""
        tally = self._tally
        before, wrong, failed = tally.num_differences, Counter(tally.wrong), Counter(tally.failed)
        yield
        tally.features.update(question.features)
        if tally.num_differences == before:
            return
        tally.bad_features.update(question.features)
        if len(tally.bad) < _MAX_BAD:
            found = {**(tally.wrong - wrong), **(tally.failed - failed)}
            tally.bad.append(f"{question.route} {' '.join(question.features)}: {found or 'tokens'}")


def differences(right: Answer, got: Answer, tolerance: float) -> list[str]:
    """Return the names of the fields that differ, except for the tokens."""
    exact = "text", "finish_reason", "matched_stop", "calls"
    found = [name for name in exact if getattr(right, name) != getattr(got, name)]
    for name in ("logprobs", "prompt_logprobs"):
        entries, others = getattr(right, name), getattr(got, name)
        if len(entries) != len(others) or not all(
            _near(a[0], b[0], tolerance) and _same_top(a[1], b[1], tolerance)
            for a, b in zip(entries, others, strict=True)
        ):
            found.append(name)
    if (right.score is None) != (got.score is None) or abs((right.score or 0) - (got.score or 0)) > tolerance:
        found.append("score")
    return found


def _near(a: float, b: float, tolerance: float) -> bool:
    return a == b or abs(a - b) <= tolerance


def _same_top(right: Sequence[tuple[int, float]], got: Sequence[tuple[int, float]], tolerance: float) -> bool:
    """Whether the candidates are equal. With a tolerance, nearly equal ones may change places."""
    if tolerance == 0 or not right:
        return tuple(right) == tuple(got)
    # Tokens that a form excludes have no order.
    right, got = ([entry for entry in entries if entry[1] > -math.inf] for entries in (right, got))
    if not right:
        return not got
    known, come = dict(right), dict(got)
    if len(come) != len(got) or len(got) != len(right) or list(got) != sorted(got, key=lambda entry: -entry[1]):
        return False
    # A candidate of only one list is below the other list's last entry, or close to it.
    bounds = min(known.values()) + tolerance, min(come.values()) + tolerance
    return all(
        abs(known[token] - come[token]) <= tolerance
        if token in known and token in come
        else (known.get(token, bounds[1]) <= bounds[1] and come.get(token, bounds[0]) <= bounds[0])
        for token in known | come
    )


class ReceivedOutputs:
    """The messages of one answer, joined for each output."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start over."""
        self.outputs = [ReceivedAnswer()]

    def restart_others(self) -> None:
        """Start the outputs behind the first over, as `attach` with an index does."""
        for output in self.outputs[1:]:
            output.restart()

    def add(self, delta: Delta) -> None:
        """Add `delta` to its output."""
        while len(self.outputs) <= delta.index:
            self.outputs.append(ReceivedAnswer())
        self.outputs[delta.index].add(delta)


class ReceivedAnswer:
    """The messages of one output, joined."""

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
