"""Score, Embed and logprob_token_ids of the whole service with two worker processes, compared with transformers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from support.demo import PROMPTS, greedy, model, reference
from support.service import Service, running, wait_for
from support.worker_kills import signal_worker

CONTINUATIONS = [" the", " a cat and a dog", " and"]
GIVEN = [300, 5, 1000]
TOLERANCE = 2e-4
"""Largest difference of a log-probability or of an element of a vector of length 1."""


@torch.inference_mode()
def logprobs_and_states(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of all tokens and the hidden state at each position."""
    loaded, _ = model()
    batch = torch.tensor([ids])
    hidden = getattr(loaded, loaded.base_model_prefix)(batch).last_hidden_state[0]
    return torch.log_softmax(loaded(batch).logits[0], dim=-1), hidden


def check_scores(prompt: str, service: Service) -> None:
    found = service.client.score(prompt, CONTINUATIONS, top_logprobs=2)
    ids = model()[1](prompt)["input_ids"]
    for entry in found.scores:
        wanted, _ = logprobs_and_states([*ids, *entry.token_ids])
        rows = wanted[len(ids) - 1 : -1]
        chosen = rows.gather(1, torch.tensor(entry.token_ids)[:, None])[:, 0]
        close([x.logprob for x in entry.logprobs], chosen)
        close([[top.logprob for top in x.top_logprobs] for x in entry.logprobs], rows.topk(2).values)


def check_vectors(prompt: str, service: Service) -> None:
    _, hidden = logprobs_and_states(model()[1](prompt)["input_ids"])
    for pooling, state in (("last_token", hidden[-1]), ("mean", hidden.mean(dim=0))):
        found = service.client.embed([prompt], pooling=pooling)  # type: ignore[arg-type]
        close(found.vectors[0], state / state.norm())


def check_given(prompt: str, service: Service) -> None:
    found = service.client.generate(prompt, ignore_eos=True, logprob_token_ids=GIVEN, **greedy(12))
    assert found.token_ids == reference(prompt, 12)
    ids = model()[1](prompt)["input_ids"]
    logprobs, _ = logprobs_and_states([*ids, *found.token_ids])
    assert {tuple(x.token_id for x in entry.token_id_logprobs) for entry in found.logprobs} == {tuple(GIVEN)}
    values = torch.tensor([[x.logprob for x in entry.token_id_logprobs] for entry in found.logprobs])
    rows = logprobs[len(ids) - 1 : -1, GIVEN]
    # end-of-sequence is banned, which raises the others a little; so differences between tokens are compared
    close((values - values[:, :1]).tolist(), rows - rows[:, :1])


def close(found: Any, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), wanted, rtol=0, atol=TOLERANCE)


def test_calls_over_worker_kills_equal_transformers() -> None:
    model()  # before the threads, which would load it at the same time
    with running("--num-workers", "2") as service, ThreadPoolExecutor(6) as pool:
        wait_for(lambda: len(service.client.stats().workers) == 2, "both workers")
        calls = [pool.submit(f, p, service) for p in PROMPTS[:5] for f in (check_scores, check_vectors, check_given)]
        wait_for(lambda: service.client.stats().gauges.num_requests_running > 2, "running requests")
        signal_worker(lambda: service.worker_pid)
        for call in calls:
            call.result()
        wait_for(service.is_idle, "all blocks free")
