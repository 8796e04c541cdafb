"""Readers that request answers in a loop and compare each field with the expected answer."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from campaigns.pauses import Timeline
from campaigns.questions import ROUTES, Answer, AskMixed, Call, Question
from campaigns.server import Reader

from lineclear.client import Client, Delta, Generation
from lineclear.errors import LineclearError, ServerStarting, UnknownRequest

_MAX_BAD = 20
_T = TypeVar("_T")


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

    def compare(self, route: str, received: ReceivedAnswer, answer: Answer, right: Answer, tolerance: float) -> None:
        """Count the differences between a complete output and the expected one. The caller holds `lock`."""
        tokens = received.tokens
        self.lost += max(0, len(right.token_ids) - len(tokens))
        self.duplicated += max(0, len(tokens) - len(right.token_ids))
        self.altered += sum(a != b for a, b in zip(tokens, right.token_ids, strict=False))
        self.ends[answer.finish_reason.value] += 1
        self.wrong.update({*received.problems, *differences(right, answer, tolerance)})
        self.wrong["tokens of the result"] += tuple(tokens) != answer.token_ids
        # A client that attaches may start inside a character.
        self.wrong["pieces of text"] += route != "submit" and received.text != answer.text
        self.wrong = +self.wrong


class CheckingReader(Reader):
    """Request answers on the route that the question names, and compare them."""

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
        super().__init__()
        self.busy_with: Question | Call | None = None
        self._times: list[float] = []  # of the tokens of this answer
        self._clients, self._next, self._tally = clients, ask, tally
        self._tolerance, self._may_forget = tolerance, may_forget

    def ask(self) -> None:
        self.busy_with = question = self._next()
        received, error = ReceivedOutputs(), ""
        got: Generation | tuple[float, ...] | None = None
        self._times = []
        try:
            got = self._call(question) if isinstance(question, Call) else self._answer(question, received)
        except LineclearError as failure:
            error = failure.reason
        except Exception as failure:  # a reader that crashed must not look like one that waits
            error = f"{type(failure).__name__}: {failure}"
        tally = self._tally
        with tally.lock, self._counting(question):
            tally.answers += 1
            tally.routes[question.route] += 1
            tally.failed.update([error] if error else [])
            if isinstance(question, Question):
                self._count(question, received, got if isinstance(got, Generation) else None)
            elif isinstance(got, tuple):
                near = len(got) == len(question.right) and all(
                    _near(a, b, self._tolerance) for a, b in zip(got, question.right, strict=True)
                )
                tally.wrong.update([] if near else [question.route])

    def _call(self, question: Call) -> tuple[float, ...]:
        found = self._repeated(lambda: question.ask(self._clients[ROUTES[0]]))
        self.progress(1)
        return found

    def _answer(self, question: Question, received: ReceivedOutputs) -> Generation:
        if question.route == "submit":
            return self._submitted(question, received)
        if question.arrives_whole:
            return self._repeated(lambda: self._read(question, received))
        return self._read(question, received)

    def _repeated(self, ask: Callable[[], _T]) -> _T:
        """Return the result of a call that the client does not resume. Repeat it if a killed server lost it."""
        while True:
            try:
                return ask()
            except LineclearError as error:
                if not self._may_forget or error.code != "UNAVAILABLE":
                    raise
                with self._tally.lock:
                    self._tally.repeated += 1

    def _read(self, question: Question, received: ReceivedOutputs) -> Generation:
        received.restart()
        client = self._clients[question.route]
        with client.stream(list(question.prompt), question.sampling, **question.params) as stream:
            self._follow(stream, received)
        return stream.result

    def _submitted(self, question: Question, received: ReceivedOutputs) -> Generation:
        """Submit, attach, detach, attach again, and compare with the stored result."""
        client = self._clients[question.route]
        while True:
            received.restart()
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

    def _follow(self, deltas: Iterable[Delta], received: ReceivedOutputs, most: int | None = None) -> None:
        for delta in deltas:
            received.add(delta)
            if delta.token_ids:
                self.progress(len(delta.token_ids))
                self._times.append(self.last_at)
            if most is not None and len(received.outputs[0].tokens) >= most:
                return

    def _count(self, question: Question, received: ReceivedOutputs, got: Generation | None) -> None:
        """Compare the outputs with the expected ones. The caller holds the lock."""
        tally = self._tally
        for output in received.outputs:
            tally.tokens += len(output.tokens)
            tally.lost += output.lost
            tally.duplicated += output.duplicated
        rights = (question.right, *question.others)
        if got is None:
            pairs = zip(received.outputs, rights, strict=False)
            tally.altered += sum(tuple(o.tokens) != right.token_ids[: len(o.tokens)] for o, right in pairs)
            return
        timings = [output.timings for output in got.outputs]
        recoveries = max(each.recoveries for each in timings)
        tally.resumes += got.resumes
        tally.accepted_tokens += sum(each.accepted_tokens for each in timings)
        tally.preemptions += sum(each.preemptions for each in timings)
        tally.recovered.update(question.features if recoveries else [])
        if question.route != "submit" and not got.resumes and not question.arrives_whole:
            tally.timelines.append(Timeline(tuple(self._times), recoveries, question.features))
        answers = Answer.all_of(got)
        if not len(answers) == len(received.outputs) == len(rights):
            tally.wrong["number of outputs"] += 1
            return
        for output, answer, right in zip(received.outputs, answers, rights, strict=True):
            tally.compare(question.route, output, answer, right, self._tolerance)

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
        self.outputs = [ReceivedAnswer()]

    def restart_others(self) -> None:
        """Start the outputs behind the first over, as `attach` with an index does."""
        self.outputs[1:] = [ReceivedAnswer() for _ in self.outputs[1:]]

    def add(self, delta: Delta) -> None:
        while len(self.outputs) <= delta.index:
            self.outputs.append(ReceivedAnswer())
        self.outputs[delta.index].add(delta)


@dataclass
class ReceivedAnswer:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    lost: int = 0
    duplicated: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.duplicated += max(0, len(self.tokens) - delta.first_index)
        self.lost += max(0, delta.first_index - len(self.tokens))
        self.tokens += delta.token_ids
        self.text += delta.text
        if delta.logprobs and len(delta.logprobs) != len(delta.token_ids):
            self.problems.append("logprobs of a piece")
