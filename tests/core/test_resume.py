"""Answers that another server began: they continue at the next index with the same tokens."""

from __future__ import annotations

import pytest
from core.harness import CoreHarness, answer, make_request
from support.events import TokensReady

from lineclear.scheduler.core.events import FinishReason


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_resume_at_every_index_gives_the_rest_of_the_answer(prefix_cache: bool) -> None:
    whole = answer(make_request("a", 13, 20))
    harness = CoreHarness(prefix_cache=prefix_cache, target_batch_tokens=8)
    for have in range(len(whole)):
        harness.submit(f"a{have}", make_request("a", 13).prompt, 20, output=tuple(whole[:have]))
    harness.run()
    for have in range(len(whole)):
        ready = [e for e in harness.events if isinstance(e, TokensReady) and e.request_id == f"a{have}"]
        assert [e.first_index for e in ready] == list(range(have, len(whole)))
        assert harness.outputs(f"a{have}") == whole[have:]
        end = harness.finished(f"a{have}")
        assert (end.reason, end.stats.completion_tokens) == (FinishReason.LENGTH, len(whole))
        assert end.stats.prompt_tokens == 13
    assert harness.counters.generation_tokens == sum(len(whole) - have for have in range(len(whole)))


def test_min_and_stop_tokens_count_from_answer_start() -> None:
    whole = answer(make_request("a", 6, 30, eos=50))
    stop = whole[9]
    alone = answer(make_request("a", 6, 30, eos=stop, min_tokens=2))
    harness = CoreHarness()
    for have in range(len(alone)):
        harness.submit(f"a{have}", make_request("a", 6).prompt, 30, eos=stop, min_tokens=2, output=tuple(alone[:have]))
    harness.run()
    for have in range(len(alone)):
        assert harness.outputs(f"a{have}") == alone[have:]
