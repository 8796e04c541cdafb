"""Right answers that go on from the other of two nearly equal tokens.

With bf16 another batch may round otherwise, so either of two tokens with nearly the same log probability may be chosen.
What follows the other one is asked of the same server while it is calm, and the whole answer is compared with that.
"""

from __future__ import annotations

from campaigns.answers import Complete, Tally, Tolerance, find_tie
from campaigns.questions import Answer

from lineclear.client import Client


def settle(tally: Tally, client: Client, tolerance: Tolerance) -> None:
    """Compare the answers of `tally.tied` with those that have the same tokens at their ties."""
    known: dict[tuple[int, ...], Answer] = {}
    for done in tally.tied:
        right = done.question.right
        while (at := find_tie(right, done.reading.tokens, tolerance)) is not None:
            begun = (*done.question.prompt, *right.token_ids[:at], done.reading.tokens[at])
            if begun not in known:
                known[begun] = _branch(done, right, at, client)
            right = known[begun]
        with tally.lock:
            tally.compare(done, right, tolerance)


def _branch(done: Complete, right: Answer, at: int, client: Client) -> Answer:
    """Return the right answer whose token at `at` is that of `done`."""
    sampling, (_, candidates) = done.question.sampling, right.logprobs[at]
    assert sampling.stop is None, "a tie may move the end of such an answer"
    assert sampling.max_tokens is not None
    token = done.reading.tokens[at]
    tokens = (*right.token_ids[:at], token)
    logprobs = (*right.logprobs[:at], (dict(candidates)[token], candidates))
    if left := sampling.max_tokens - len(tokens):
        prompt = [*done.question.prompt, *tokens]
        rest = Answer.of(client.generate(prompt, sampling.replace(max_tokens=left), **done.question.params))
        tokens, logprobs = (*tokens, *rest.token_ids), (*logprobs, *rest.logprobs)
    text = client.detokenize(tokens)
    return Answer(tokens, text, right.finish_reason, right.matched_stop, logprobs)
