"""Assemble an answer from the responses of its stream and check that no token is missing or repeated. No I/O."""

from __future__ import annotations

from dataclasses import replace

from lineclear.errors import DataLoss, ModelChanged
from lineclear.v1 import inference_pb2 as pb

from .results import (
    Delta,
    FinishReason,
    Generation,
    Started,
    Timings,
    TokenLogprobs,
    Usage,
    delta_from_proto,
    from_proto,
)


class AnswerAssembler:
    """The answer so far, from the token `first_index` on. It grows with every `add`."""

    def __init__(self, first_index: int = 0) -> None:
        self._first_index = first_index
        self.token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._times_seconds: list[float] = []
        self._started: Started | None = None
        self.resumes = 0
        """How often the answer was resumed."""
        self.restarts = 0
        """How often the answer started over with another model."""
        self._finish_reason: FinishReason | None = None
        self._finished: pb.Finished | None = None

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def next_index(self) -> int:
        """The index of the next token."""
        return self._first_index + len(self.token_ids)

    @property
    def complete(self) -> bool:
        """Whether the last response has been added."""
        return self._finished is not None

    def add(self, message: pb.GenerateResponse) -> Delta:
        """Add a response and return it as a Delta.

        Raises DataLoss if it does not start at the next token, ModelChanged if another model or prompt answers.
        """
        if self.complete:
            raise DataLoss("the server sent more after the end of the answer")
        delta = delta_from_proto(message)
        if self._started is not None and delta.started is not None:
            _check_same(self._started, delta.started)
            delta = replace(delta, started=None)  # of a resumed call
        count, have = len(delta.token_ids), self.next_index
        if count and delta.first_index != have:
            raise DataLoss(
                f"the answer continues at token {delta.first_index}, token {have} was expected",
                metadata={"expected_index": str(have), "received_index": str(delta.first_index)},
            )
        for name, entries in (("logprobs", delta.logprobs), ("token times", delta.token_times_seconds)):
            if entries and len(entries) != count:
                raise DataLoss(f"a response has {count} tokens and {len(entries)} {name}")
        self.token_ids += delta.token_ids
        self._texts.append(delta.text)
        self._logprobs += delta.logprobs
        self._times_seconds += delta.token_times_seconds
        self._started = self._started or delta.started
        if delta.finish_reason is not None:
            self._finish_reason, self._finished = delta.finish_reason, message.finished
        return delta

    def close(self) -> None:
        """Record the end of the stream. Raises DataLoss if the answer is not complete."""
        if not self.complete:
            raise DataLoss(f"the stream ended after {len(self.token_ids)} tokens without the end of the answer")

    def rest(self, message: pb.GenerateRequest) -> pb.GenerateRequest:
        """Return the request that resumes the answer to `message`."""
        again = pb.GenerateRequest()
        again.CopyFrom(message)
        if self._started is not None:
            again.sampling.seed = self._started.seed
            again.resume.model_fingerprint = self._started.model_fingerprint
            again.resume.chat_time_us = self._started.chat_time_us
            if self._started.prompt_digest:
                again.resume.prompt_digest = self._started.prompt_digest
        again.resume.token_ids[:] = self.token_ids
        again.resume.SetInParent()
        return again

    def generation(self) -> Generation:
        """Return the complete answer."""
        assert self._finished is not None
        assert self._finish_reason is not None
        return Generation(
            text=self.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self._finish_reason,
            matched_stop=_matched_stop(self._finished),
            usage=from_proto(Usage, self._finished.usage),
            timings=from_proto(Timings, self._finished.timings),
            started=self._started or Started(),
            logprobs=tuple(self._logprobs),
            token_times_seconds=tuple(self._times_seconds),
            resumes=self.resumes,
            restarts=self.restarts,
        )


def _check_same(first: Started, then: Started) -> None:
    """Raise ModelChanged or DataLoss if a resumed call answers another request.

    Servers compare, except for Attach: the request_id may belong to another request by now.
    """
    if (first.model_fingerprint, first.prompt_digest) != (then.model_fingerprint, then.prompt_digest):
        raise ModelChanged(
            "the resumed call has another model or another prompt",
            metadata={
                "model_fingerprint": then.model_fingerprint,
                "expected_model_fingerprint": first.model_fingerprint,
            },
        )
    if first.seed != then.seed:
        raise DataLoss("the resumed call has another seed")


def _matched_stop(finished: pb.Finished) -> str | int | None:
    if finished.HasField("matched_stop_string"):
        return finished.matched_stop_string
    return finished.matched_token_id if finished.HasField("matched_token_id") else None
