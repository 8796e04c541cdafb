"""Non-finite keys and values from a prompt chunk that samples nothing, so that they show only at the first token.

The request fails alone, and its blocks are clean for their next owner.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from support.families import WIDE, tiny_model
from support.inprocess import Failure, InProcess
from support.kernel_variants import needs_kernels
from torch import Tensor

from lineclear.errors import NonFiniteLogits
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import Logprobs, Sampling
from lineclear.worker.model.loader import to_quantized, wrap_model
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions

pytestmark = needs_kernels
POISON = 7
LIMITS = CoreLimits(max_batch_size=8, target_batch_tokens=16)
Answer = tuple[list[int], list[Logprobs]]


def neighbours(name: str) -> list[Request]:
    torch.manual_seed(3)
    prompts = [tuple(torch.randint(8, 200, (n,)).tolist()) for n in (5, 20, 33, 11)]
    sampling = Sampling(logprobs=2, banned_ids=(POISON,))
    return [Request(f"{name}-{i}", prompt, sampling, 24) for i, prompt in enumerate(prompts)]


class Served(NamedTuple):
    """A server of an int8 model, whose integer sums are exact, and its embeddings."""

    server: InProcess
    embeddings: Tensor

    def answers(self, requests: list[Request]) -> list[Answer]:
        tokens = self.server.serve(requests)
        return [(tokens[x.request_id], self.server.logprobs(x.request_id)) for x in requests]


def served(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> Served:
    loaded = to_quantized(wrap_model(tiny_model("llama", dtype=dtype, **WIDE)))
    runner = ModelRunner(loaded, RunnerOptions(num_blocks=18, num_slots=8, max_step_tokens=64, kv_dtype=kv_dtype))
    return Served(InProcess(runner, LIMITS), loaded.model.model.embed_tokens.weight)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(torch.float32, torch.int8), (torch.bfloat16, None)])
def test_non_finite_first_chunk_fails_the_request(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    wanted = served(dtype, kv_dtype).answers(neighbours("x"))
    tested = served(dtype, kv_dtype)
    server = tested.server
    with torch.inference_mode():
        tested.embeddings[POISON] = float("nan")
    for request in neighbours("beside"):
        server.events += server.core.submit(request, 0)
    prompt = (9, POISON, *range(20, 78))  # of four chunks, of which the last one samples
    with pytest.raises(Failure) as caught:
        server.serve([Request("bad", prompt, Sampling(), 8)])
    assert isinstance(caught.value.args[0], NonFiniteLogits)
    started = [(plan, x.slot) for plan in server.plans for x in plan.inits if x.prompt_len == len(prompt)]
    (first,) = (row for row in started[0][0].chunks if row.slot == started[0][1])
    assert (first.start, first.sample) == (0, False), "nothing was sampled where it was computed"

    for i, request in enumerate(neighbours("beside")):
        tokens = [token for event in server.events for token in _tokens(event, request.request_id)]
        assert (tokens, server.logprobs(request.request_id)) == wanted[i]
    assert tested.answers(neighbours("after")) == wanted, "in the blocks that it had, among others"
    cleared = {block for x in server.plans for block in (*x.zero_blocks, *(copy.target for copy in x.copy_blocks))}
    assert cleared >= {*first.new_blocks}, "what it left behind was cleared"
    with pytest.raises(Failure) as caught:  # alone, in steps that are greedy throughout
        server.serve([Request("again", prompt, Sampling(), 8)])
    assert isinstance(caught.value.args[0], NonFiniteLogits)


def _tokens(event: Any, request_id: str) -> tuple[int, ...]:
    return event.tokens if getattr(event, "request_id", "") == request_id and hasattr(event, "first_index") else ()
