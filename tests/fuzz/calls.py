"""Seeded calls of the whole service: valid and damaged methods, messages, metadata and deadlines.

`Call.may_end_with` says which statuses a call may have. A cancellation or a deadline is allowed only for calls that
have one.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fuzz.parameters import add_hostile, add_plausible
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from support.damage import mutate

from lineclear.model_files.fingerprint import prompt_digest
from lineclear.v1 import inference_pb2 as pb

ALWAYS_ALLOWED = frozenset(
    {"OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ALREADY_EXISTS", "NOT_FOUND"}
)
"""Statuses that any call may have."""
_NUM_SEEDS, _MAX_SEED_BYTES = 200, 4096
_IDS = [f"fuzz-{number}" for number in range(12)]
_DURATIONS = (
    *((1, 0), (0, 1), (0, 0), (-1, 0), (0, -1), (60, 999_999_999), (1, 1_000_000_000), (1, -1), (-1, 1)),
    *((2_147_484, 0), (315_576_000_000, 999_999_999), (315_576_000_001, 0), (2**63 - 1, 2**31 - 1)),
    (-(2**63), -(2**31)),
)
_KEYS = ("traceparent", "tracestate", "authorization", "x-tenant-id", "x-request-id", "grpc-tags-bin", "priority")
_VALUES = (
    "",
    "Bearer",
    "Bearer x",
    "bearer \x7e",
    "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "00-00000000000000000000000000000000-0000000000000000-00",
    "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
    "tenant",
    "../../etc",
)


@dataclass(frozen=True)
class Call:
    """One call. Its messages are sent, then its sending side is closed."""

    method: str
    messages: tuple[bytes, ...]
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    deadline_seconds: float | None = None
    reads: int = 1
    """Number of messages to read before the call is cancelled."""

    def may_end_with(self, status: str) -> bool:
        if status in ALWAYS_ALLOWED:
            return True
        if status == "DEADLINE_EXCEEDED":
            return self.deadline_seconds is not None or self.method == "Attach" or self._has_timeout()
        if status == "ABORTED":  # another fingerprint or digest, in this request or in a submitted one
            return self.method in ("Attach", "Submit") or self._names_a_model()
        if status == "CANCELLED":  # by another call with its request id
            return self.method == "Attach" or any(request.request_id for request in self._requests())
        # A server without tokens ignores them, but the transport refuses values that are invalid in HTTP.
        return status == "UNAUTHENTICATED" and any(key == "authorization" for key, _ in self.metadata)

    def _parsed(self) -> Iterator[Any]:
        """Yield the messages that can be read."""
        kinds: dict[str, type[Message]] = {
            "Submit": pb.SubmitRequest,
            "Score": pb.ScoreRequest,
            "Embed": pb.EmbedRequest,
        }
        for data in self.messages:
            with contextlib.suppress(DecodeError):
                yield kinds.get(self.method, pb.GenerateRequest).FromString(data)

    def _requests(self) -> list[pb.GenerateRequest]:
        if self.method == "Submit":
            return [message.request for message in self._parsed()]
        return [*self._parsed()] if self.method == "Generate" else []

    def _has_timeout(self) -> bool:
        return self.method == "Submit" and any(message.HasField("timeout") for message in self._parsed())

    def _names_a_model(self) -> bool:
        return any(
            message.model_fingerprint or (isinstance(message, pb.GenerateRequest) and message.HasField("resume"))
            for message in self._parsed()
        )


class Calls:
    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._corpus = _seeds(random.Random(seed))
        self._corpus_bytes = [data for _, data in self._corpus]

    def next(self) -> Call:
        """Return the next call: two in three are damaged, the others are valid messages with unusual values."""
        rng = self._rng
        if rng.random() < 0.65:
            method, data = rng.choice(self._corpus)
            messages: tuple[bytes, ...] = (mutate(data, rng, self._corpus_bytes),)
        else:
            makers = self._generate, self._session, self._submit, self._submitted, self._resumed, self._prompts
            method, sent = rng.choice(makers)()
            messages = tuple(message.SerializeToString() for message in sent)
        deadline = rng.choice((0.001, 0.01, 0.05)) if rng.random() < 0.05 else None
        reads = rng.choice((1, 1, 4, 10**6))
        return Call(method, messages, self._metadata(), deadline, reads)

    def _metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        rng = self._rng
        if rng.random() < 0.7:
            return ()
        return tuple(self._pair(rng.choice(_KEYS)) for _ in range(rng.choice((1, 2, 40))))

    def _pair(self, key: str) -> tuple[str, str | bytes]:
        rng = self._rng
        if key.endswith("-bin"):
            return key, rng.randbytes(rng.choice((0, 29, 2000)))
        value = rng.choice(_VALUES)
        if rng.random() < 0.3:
            value = "".join(chr(rng.randrange(0x20, 0x7F)) for _ in range(rng.choice((1, 55, 3000)))).strip()
        return key, value

    def _request(self) -> pb.GenerateRequest:
        rng = self._rng
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[rng.randrange(5, 400) for _ in range(rng.choice((1, 8, 100)))]),
            sampling={"max_tokens": rng.choice((1, 20, 100)), "seed": rng.getrandbits(64)},
        )
        add_plausible(request, rng)
        if rng.random() < 0.5:
            request.request_id = rng.choice(_IDS)
        if rng.random() < 0.4:
            add_hostile(request, rng)
        return request

    def _duration(self) -> Duration:
        seconds, nanos = self._rng.choice(_DURATIONS)
        return Duration(seconds=seconds, nanos=nanos)

    def _generate(self) -> tuple[str, list[Message]]:
        return "Generate", [self._request()]

    def _session(self) -> tuple[str, list[Message]]:
        """Make session commands with reused, early-cancelled and unknown handles."""
        rng = self._rng
        sent: list[Message] = []
        for _ in range(rng.randint(1, 6)):
            submits = [
                pb.SubmitCommand(handle=rng.choice((0, 1, 2, 2**64 - 1)), request=self._request())
                for _ in range(rng.randint(1, 3))
            ]
            for submit in submits:
                if rng.random() < 0.3:
                    submit.timeout.CopyFrom(self._duration())
            cancels = [pb.CancelCommand(handle=rng.choice((0, 1, 2, 2**64 - 1))) for _ in range(rng.randint(0, 2))]
            for cancel in cancels:
                if rng.random() < 0.3:
                    cancel.index = rng.choice((0, 1, 2**32 - 1))
            parts = rng.choice(((submits[:1], []), (submits, cancels), ([], cancels), ([], [])))
            sent.append(pb.SessionRequest(submits=parts[0], cancels=parts[1]))
        return "Session", sent

    def _submit(self) -> tuple[str, list[Message]]:
        message = pb.SubmitRequest(request=self._request())
        if self._rng.random() < 0.7:
            message.timeout.CopyFrom(self._duration())
        return "Submit", [message]

    def _submitted(self) -> tuple[str, list[Message]]:
        """Make a request about a submitted request that may not exist."""
        rng = self._rng
        request_id = rng.choice((*_IDS, "", "x" * 65, "unknown"))
        index = rng.choice((0, 1, 5, 100, 2**32 - 1))
        more = [rng.choice((0, 1, 2**32 - 1)) for _ in range(rng.choice((0, 0, 1, 200)))]
        return rng.choice(
            (
                ("Attach", [pb.AttachRequest(request_id=request_id, from_index=index, more_from_indexes=more)]),
                ("GetResult", [pb.GetResultRequest(request_id=request_id)]),
                ("Cancel", [pb.CancelRequest(request_id=request_id)]),
                ("Cancel", [pb.CancelRequest(request_id=request_id, index=rng.choice((0, 1, 2**32 - 1)))]),
            )
        )

    def _prompts(self) -> tuple[str, list[Message]]:
        """Make a request for scores, vectors or tokens, mostly with a hostile field."""
        rng = self._rng
        ids = pb.TokenIds(ids=[rng.randrange(5, 400) for _ in range(rng.choice((1, 8, 100)))])
        message: Message
        if rng.random() < 0.5:
            parts = [pb.Continuation(token_ids=ids) for _ in range(rng.choice((1, 3, 128)))]
            top = rng.choice((0, 20))
            method, message = "Score", pb.ScoreRequest(token_ids=ids, continuations=parts, top_logprobs=top)
        else:
            inputs = [pb.EmbedInput(token_ids=ids) for _ in range(rng.choice((1, 3, 128)))]
            method, message = "Embed", pb.EmbedRequest(inputs=inputs, pooling=rng.choice((0, 1, 2)))
        if rng.random() < 0.6:
            add_hostile(message, rng)
        return method, [message]

    def _resumed(self) -> tuple[str, list[Message]]:
        """Make a resume of an answer that this server never gave."""
        rng = self._rng
        request = self._request()
        request.resume.token_ids.extend(rng.randrange(600) for _ in range(rng.choice((0, 1, 19, 20, 101, 600))))
        if rng.random() < 0.5:
            request.sampling.n = rng.choice((1, 2, 3))
            for _ in range(rng.choice((0, 1, 2, 3, 300))):
                request.resume.outputs.add(token_ids=range(rng.choice((0, 1, 20))), is_complete=rng.random() < 0.3)
        if rng.random() < 0.5:
            request.resume.chat_time_us = rng.choice((-1, 0, 2**63 - 1, -(2**63)))
        if rng.random() < 0.5:
            request.resume.model_fingerprint = rng.choice(("", "toy", "another", "\u00e9" * 2000))
        if rng.random() < 0.5:
            request.resume.prompt_digest = rng.choice(("", "0", "f" * 64))
        return "Generate", [request]


def _seeds(rng: random.Random) -> list[tuple[str, bytes]]:
    """Return the undamaged messages as (method, bytes), many of them with a hostile field."""
    good = pb.GenerateRequest(
        request_id="fuzz",
        token_ids=pb.TokenIds(ids=[5, 6, 7]),
        sampling={"temperature": 0.5, "seed": 3, "max_tokens": 4, "top_k": 9, "logit_bias": [{"token_id": 5}]},
        stop={"strings": ["a", "bc"], "token_ids": [9]},
        output={"logprobs": True, "top_logprobs": 2},
        resume={"token_ids": [5], "model_fingerprint": "toy", "prompt_digest": prompt_digest([5, 6, 7])},
    )
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
    generate: list[pb.GenerateRequest] = [good, pb.GenerateRequest(text="quick"), pb.GenerateRequest(chat=chat)]
    while len(generate) < _NUM_SEEDS:
        request = pb.GenerateRequest(text="quick")
        add_plausible(request, rng)
        add_hostile(request, rng)
        generate += [request] if request.ByteSize() < _MAX_SEED_BYTES else []
    timeout = Duration(seconds=5, nanos=7)
    found: list[tuple[str, Message]] = [("Generate", request) for request in generate]
    commands = [pb.SubmitCommand(handle=1, request=request, timeout=timeout) for request in generate]
    found += [("Session", pb.SessionRequest(submits=[command])) for command in commands]
    found += [("Submit", pb.SubmitRequest(request=request, timeout=timeout)) for request in generate[:3]]
    found += [
        ("Session", pb.SessionRequest(cancels=[pb.CancelCommand(handle=1)])),
        ("Session", pb.SessionRequest(submits=[pb.SubmitCommand(handle=n) for n in (1, 2)])),
        ("Session", pb.SessionRequest(cancels=[pb.CancelCommand(handle=n) for n in (1, 2)])),
        ("Score", pb.ScoreRequest(text="quick", continuations=[pb.Continuation(text=text) for text in (" fox", "es")])),
        ("Embed", pb.EmbedRequest(inputs=[pb.EmbedInput(text="quick")], pooling=pb.POOLING_MEAN, dimensions=2)),
        ("Tokenize", pb.TokenizeRequest(text="some text")),
        ("Tokenize", pb.TokenizeRequest(chat=chat)),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[5, 6, 7])),
        ("Attach", pb.AttachRequest(request_id="fuzz", from_index=1)),
        ("GetResult", pb.GetResultRequest(request_id="fuzz")),
        ("Cancel", pb.CancelRequest(request_id="fuzz")),
    ]
    return [(method, message.SerializeToString()) for method, message in found]
