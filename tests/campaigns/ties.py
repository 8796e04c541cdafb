"""Compare answers after a tie: the other of two nearly equal tokens.

With bf16, another batch may round differently, so either of two tokens with nearly equal log probabilities may be
chosen. The same server then computes the rest after that token, alone, and the whole answer is compared with it.
"""

from __future__ import annotations

from campaigns.answers import Complete, Tally, Tolerance, find_tie
from campaigns.questions import Answer

from lineclear.client import Client


def settle(tally: Tally, client: Client, tolerance: Tolerance) -> None:
    """Compare the answers of `tally.tied` with expected ones that have the same tokens at their ties."""
    known: dict[tuple[int, ...], Answer] = {}
    for done in tally.tied:
        right = done.question.right
        while (at := find_tie(right, done.received.tokens, tolerance)) is not None:
            prefix = (*done.question.prompt, *right.token_ids[:at], done.received.tokens[at])
            if prefix not in known:
                known[prefix] = _branch(done, right, at, client)
            right = known[prefix]
        with tally.lock:
            tally.compare(done, right, tolerance)


def _branch(done: Complete, right: Answer, at: int, client: Client) -> Answer:
    """Return the expected answer whose token at `at` is that of `done`."""
    sampling, (_, candidates) = done.question.sampling, right.logprobs[at]
    assert sampling.stop is None, "a tie may move the end of such an answer"
    assert sampling.max_tokens is not None
    token = done.received.tokens[at]
    tokens = (*right.token_ids[:at], token)
    logprobs = (*right.logprobs[:at], (dict(candidates)[token], candidates))
    if left := sampling.max_tokens - len(tokens):
        prompt = [*done.question.prompt, *tokens]
        rest = Answer.of(client.generate(prompt, sampling.replace(max_tokens=left), **done.question.params))
        tokens, logprobs = (*tokens, *rest.token_ids), (*logprobs, *rest.logprobs)
    text = client.detokenize(tokens)
    return Answer(tokens, text, right.finish_reason, right.matched_stop, logprobs)
