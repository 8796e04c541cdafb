"""Each numeric argument of the batchers refuses what is no number of its range, by its name, and takes numpy's."""

from __future__ import annotations

import inspect
import logging
import math
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from lineclear.embedded import Batcher, ItemBatcher
from lineclear.embedded.options import Options
from lineclear.errors import InvalidRequest


def same(values: list[Any]) -> list[Any]:
    return values


def next_tokens(batch: Any) -> list[int]:
    return [row.tokens[-1] + 1 for row in batch.sampling_rows]


def submit_to(batcher: Any, *arguments: Any) -> Callable[..., Any]:
    def submit(**given: Any) -> Any:
        with batcher() as running:
            return running.submit(*arguments, **given).result(60)

    return submit


CALLS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "ItemBatcher": (ItemBatcher.__init__, lambda **given: ItemBatcher(same, **given)),
    "Batcher": (Batcher.__init__, lambda **given: Batcher(next_tokens, **given)),
    "ItemBatcher.submit": (ItemBatcher.submit, submit_to(lambda: ItemBatcher(same), 5)),
    "Batcher.submit": (
        Batcher.submit,
        lambda max_tokens=3, **given: submit_to(lambda: Batcher(next_tokens), [1, 2])(max_tokens=max_tokens, **given),
    ),
}


def numeric() -> Iterator[tuple[str, str, Any]]:
    """Yield each argument that is an int or a float, of the signatures and of the options."""
    for call, (function, _) in CALLS.items():
        hints = dict(typing.get_type_hints(function))
        if "options" in inspect.signature(function).parameters:
            hints |= typing.get_type_hints(Options)
        for name, hint in hints.items():
            kinds = set(typing.get_args(hint)) or {hint}
            if kinds & {int, float} and name not in ("return", "options", "prompt", "stop_ids"):
                yield call, name, int if int in kinds else float


@pytest.mark.parametrize(("call", "name", "kind"), list(numeric()))
def test_numeric_argument_is_checked(call: str, name: str, kind: type) -> None:
    run = CALLS[call][1]
    bad: list[Any] = [math.nan, -math.inf, True, "3", b"3", [1], 1j, 10**400, np.float64("nan"), np.array([1, 2])]
    bad += [1.5, 2.0, -1, math.inf, np.float64(2.0)] if kind is int else []
    for value in bad:
        with pytest.raises((ValueError, InvalidRequest), match=f"^{name} is "):
            run(**{name: value})
    run(**{name: np.int64(2) if kind is int else np.float32(2.0)})


def test_there_are_numeric_arguments() -> None:
    assert len(list(numeric())) > 25


@pytest.mark.parametrize("prompt", ["ab", b"ab", [1.5], [-1], ["1"], [2**31], [], [None], 5, [[1]]])
def test_prompt_is_checked(prompt: Any) -> None:
    with Batcher(next_tokens) as batcher, pytest.raises(InvalidRequest, match="prompt"):
        batcher.submit(prompt, 3)


@pytest.mark.parametrize("prompt", [np.array([1, 2]), (1, 2), range(1, 3), [np.int32(1), np.uint8(2)]])
def test_prompts_of_any_sequence_of_integers(prompt: Sequence[int]) -> None:
    with Batcher(next_tokens) as batcher:
        assert list(batcher.submit(prompt, 3, stop_ids=np.array([4])).result(60).tokens) == [3, 4]


def test_item_costs_the_default_if_the_estimator_raises(caplog: pytest.LogCaptureFixture) -> None:
    def estimated(item: Any) -> int:
        return len(item)

    batcher = ItemBatcher(same, cost_estimator=estimated, default_cost=3, target_batch_cost=10)
    with caplog.at_level(logging.WARNING, "lineclear"), batcher:
        futures = [batcher.submit(5), batcher.submit(6), batcher.submit("ab")]
        assert [future.cost for future in futures] == [3, 3, 2]
        assert [future.result(60) for future in futures] == [5, 6, "ab"]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("cost", [0, -1, 1.5, math.nan, True, "3", None])
def test_wrong_cost_of_an_estimator_is_an_error(cost: Any) -> None:
    with ItemBatcher(same, cost_estimator=lambda item: cost) as batcher:  # noqa: SIM117
        with pytest.raises(InvalidRequest, match=r"^cost is "):
            batcher.submit(5)
