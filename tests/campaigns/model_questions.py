"""Questions to a model, and the answers that a server gives to them before it is disturbed."""

from __future__ import annotations

import random
import signal
import threading
from typing import Any

from campaigns.questions import ROUTES, Answer, Ask, Question
from campaigns.server import Server

from lineclear.client import Client, Sampling


def model_questions(target: str, server: Server, num: int, seed: int, token: str, *, greedy: bool) -> Ask:
    """Return `num` questions whose answers `server` gives beforehand, one at a time, and end it.

    With `greedy`, only the most likely token is right, because another batch may round differently.
    """
    rng = random.Random(seed)
    server.wait_for("worker_joined")
    known: list[Question] = []
    with Client(target, token=token) as client:
        model = client.model()
        for number in range(num):
            prompt = tuple(rng.randrange(model.vocab_size) for _ in range(rng.randrange(8, 60)))
            fields: dict[str, Any] = {"temperature": 0.0}
            if not greedy:
                penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.25}
                fields = {"temperature": 0.8 * (number % 2), "top_p": 0.95, **(penalties if number % 3 else {})}
            banned = model.eos_token_ids if greedy else ()
            sampling = Sampling(seed=number, max_tokens=96, ignore_eos=True, banned_token_ids=banned, **fields)
            top = 2 if greedy or number % 2 else None
            params: dict[str, Any] = {} if top is None else {"logprobs": True, "top_logprobs": top}
            right = client.generate(list(prompt), sampling, **params)
            if not greedy and number % 4 == 0 and len(right.text) > 40:
                sampling = sampling.replace(stop=right.text[30:34])
                right = client.generate(list(prompt), sampling, **params)
            known.append(Question(prompt, sampling, Answer.of(right), top))
    server.end(signal.SIGTERM)
    lock = threading.Lock()

    def ask() -> Question:
        with lock:
            question, route = rng.choice(known), rng.choice(ROUTES)
        return Question(question.prompt, question.sampling, question.right, question.top_logprobs, route)

    return ask
