"""The model `lineclear` of lm-evaluation-harness (Gao et al. 2024): a running server as the model of its tasks.

    pip install 'lineclear[lm-eval]'
    python -m lineclear.client.lm_eval --model lineclear --model_args target=127.0.0.1:50051 --tasks hellaswag

The module takes the arguments of the command `lm_eval`; a program imports it and calls `simple_evaluate("lineclear",
...)`. The server tokenizes. Pairs and windows are those of the harness's own models, so that results equal its `hf`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from . import Client, Request, Scores

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


@register_model("lineclear")
class LineclearLM(TemplateLM):  # type: ignore[misc]
    """A client as a model. Arguments beside those of `Client`:

    `concurrency`: requests at a time, by default the slots of the server. `max_length`: most tokens of a context and
    its continuation without the last; by default what the server takes. `prefix_token_id` stands before a text without
    context; by default the token that the server puts before prompts, or the first end-of-sequence token.
    """

    eot_token_id = prefix_token_id = 0  # the constructor has the values

    def __init__(
        self,
        target: str | None = None,
        concurrency: int | None = None,
        max_length: int | None = None,
        prefix_token_id: int | None = None,
        **client: Any,
    ) -> None:
        super().__init__()
        for ignored in ("batch_size", "max_batch_size", "device"):  # the harness's; the server has its own
            client.pop(ignored, None)
        self._client = Client(target, **client)
        model = self._client.model()
        self._concurrency, self._added, self.eot_token_id = (
            concurrency,
            self._client.tokenize(""),
            model.eos_token_ids[0],
        )
        self.prefix_token_id = [*self._added, self.eot_token_id][0] if prefix_token_id is None else prefix_token_id
        # A context and its continuation are one token longer, and the server takes fewer tokens than its context.
        self.max_length = max_length or model.context_length - 2

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **more: Any) -> list[int]:
        """Return token ids as the server makes them, with `add_special_tokens` False without those it adds."""
        ids = self._client.tokenize(string)
        return ids[len(self._added) :] if add_special_tokens is False else ids

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **more: Any
    ) -> list[tuple[float, bool]]:
        items = []
        for _, context, continuation in requests:
            ids = [*context, *continuation][-self.max_length - 1 :]
            cut = max(1, len(ids) - len(continuation))
            items.append((ids[:cut], [ids[cut:]]))
        shown = not disable_tqdm
        found = self._client.score_batch(items, top_logprobs=1, concurrency=self._concurrency, progress=shown)
        return list(map(_result, found))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        windows = [list(self._windows(request.args[0])) for request in requests]
        found = iter(self._loglikelihood_tokens(list(itertools.chain(*windows)), disable_tqdm))
        return [sum(logprob for logprob, _ in itertools.islice(found, len(of_text))) for of_text in windows]

    def _windows(self, text: str) -> Iterator[tuple[None, list[int], list[int]]]:
        windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
        return ((None, *make_disjoint_window(window)) for window in windows)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        prompts = [self._request(*request.args) for request in requests]
        found = self._client.generate_batch(prompts, concurrency=self._concurrency, progress=not disable_tqdm)
        return [answer.text for answer in found]

    def _request(self, context: str, gen_kwargs: dict[str, Any]) -> Request:
        given = normalize_gen_kwargs(gen_kwargs)
        max_tokens, stop = given["max_gen_toks"], [text for text in given["until"] if text]
        sampling = {name: given[name] for name in _SAMPLING if name in given}
        prompt, kept = context or [self.prefix_token_id], self.max_length - max_tokens
        return Request.of(prompt, max_tokens=max_tokens, stop=stop, truncate_prompt_tokens=kept, **sampling)


def _result(scores: Scores) -> tuple[float, bool]:
    """Return the log-probability of the continuation, and whether greedy decoding gives it."""
    (score,) = scores.scores
    tokens = zip(score.token_ids, score.logprobs, strict=True)
    return score.total_logprob, all(entry.top_logprobs[0].token_id == token_id for token_id, entry in tokens)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
