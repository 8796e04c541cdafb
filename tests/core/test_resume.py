"""An answer that another server began: it goes on at the next index as if it had been made here from the start."""

from __future__ import annotations

import pytest
from core.harness import Rig, answer, make_request

from lineclear.scheduler.core.events import Finished, FinishReason, TokensReady


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_every_place_to_go_on_from_gives_the_rest_of_the_same_answer(prefix_cache: bool) -> None:
    whole = answer(make_request("a", 13, 20))
    rig = Rig(prefix_cache=prefix_cache, target_batch_tokens=8)
    for have in range(len(whole)):
        rig.submit(f"a{have}", make_request("a", 13).prompt, 20, output=tuple(whole[:have]))
    rig.run()
    for have in range(len(whole)):
        ready = [e for e in rig.events if isinstance(e, TokensReady) and e.request_id == f"a{have}"]
        assert [e.first_index for e in ready] == list(range(have, len(whole)))
        assert rig.outputs(f"a{have}") == whole[have:]
        end = rig.end(f"a{have}")
        assert isinstance(end, Finished)
        assert (end.reason, end.record.completion_tokens) == (FinishReason.LENGTH, len(whole))
        assert end.record.prompt_tokens == 13
    assert rig.counters.output_tokens == sum(len(whole) - have for have in range(len(whole)))


def test_the_worker_may_die_under_it() -> None:
    whole = answer(make_request("a", 5, 12))
    rig = Rig(pipeline_depth=2)
    rig.submit("a", make_request("a", 5).prompt, 12, output=tuple(whole[:4]))
    for _ in range(3):
        rig.step()
    rig.lose()
    rig.join()
    rig.run()
    assert rig.outputs("a") == whole[4:]


def test_minimum_and_stop_tokens_count_from_the_beginning_of_the_answer() -> None:
    whole = answer(make_request("a", 6, 30, eos=50))
    stop = whole[9]
    alone = answer(make_request("a", 6, 30, eos=stop, min_tokens=2))
    rig = Rig()
    for have in range(len(alone)):
        rig.submit(f"a{have}", make_request("a", 6).prompt, 30, eos=stop, min_tokens=2, output=tuple(alone[:have]))
    rig.run()
    for have in range(len(alone)):
        assert rig.outputs(f"a{have}") == alone[have:]
