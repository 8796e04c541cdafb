"""Expected output lengths: what estimators answer, and what reaches the core."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
from support.answers import answered
from support.serving import Serving, serving, text_request

from lineclear.process.settings_base import ConfigurationError
from lineclear.scheduler.requests.expected_length import AnswerShape, LearnedLength, OutputLengths, load_estimator
from lineclear.v1 import inference_pb2 as pb


def learned(lengths: Sequence[int], **shape: Any) -> LearnedLength:
    estimator = LearnedLength()
    for length in lengths:
        estimator.observe(_shape(**shape), length)
    return estimator


def _shape(tenant: str = "a", prompt: int = 8, max_tokens: int = 500, expected: int = 0) -> AnswerShape:
    return AnswerShape(tenant, prompt, max_tokens, expected)


def test_estimate_is_the_mean_of_the_last_answers() -> None:
    assert learned([40] * 5).estimate(_shape()) == 40
    assert learned([10, 30] * 100).estimate(_shape()) == pytest.approx(20, abs=1)
    assert learned([400] * 100 + [10] * 300).estimate(_shape()) == pytest.approx(10, abs=2)
    assert learned([7, 7]).estimate(_shape("b")) == 0, "the tenant is unknown"
    assert learned([]).estimate(_shape(expected=9)) == 9


def test_prompts_of_similar_length_count_most() -> None:
    estimator = LearnedLength()
    for _ in range(50):
        estimator.observe(_shape(prompt=8), 10)
        estimator.observe(_shape(prompt=1000), 200)
    assert estimator.estimate(_shape(prompt=10)) < 40
    assert estimator.estimate(_shape(prompt=900)) > 170
    assert estimator.estimate(_shape(prompt=60)) == pytest.approx(105, abs=3)


def test_clients_number_is_corrected_by_its_earlier_numbers() -> None:
    honest = learned([20] * 50, expected=20)
    assert honest.estimate(_shape(expected=300)) == pytest.approx(300, abs=1)
    liar = learned([200] * 50, expected=2)
    assert liar.estimate(_shape(expected=2)) > 150


def test_tenants_are_bounded() -> None:
    estimator = LearnedLength()
    for number in range(3000):
        estimator.observe(_shape(f"t{number}"), 5)
    assert estimator.estimate(_shape("t0")) == 0
    assert estimator.estimate(_shape("t2999")) == 5


@pytest.mark.parametrize(
    ("shape", "num_received", "expected"),
    [
        *((_shape(), 0, 40), (_shape(), 60, 61), (_shape("b"), 3, 0)),
        *((_shape(max_tokens=30), 0, 30), (_shape(max_tokens=61), 61, 61)),
    ],
)
def test_expected_tokens_lie_between_received_and_max_tokens(
    shape: AnswerShape, num_received: int, expected: int
) -> None:
    assert OutputLengths(learned([40] * 5)).expect(shape, num_received) == expected


async def expected_tokens(s: Serving, *requests: pb.GenerateRequest) -> list[int]:
    """Return what the engine expects of each request; all answers have six tokens."""
    for request in requests:
        await answered(s, [5] * 6, request)
    return [request.expected_tokens for request in s.engine.submitted]


async def test_server_learns_from_complete_answers(s: Serving) -> None:
    requests = [text_request(sampling={"max_tokens": count}) for count in (9, 9, 4)]
    assert await expected_tokens(s, *requests) == [0, 6, 4]


async def test_without_estimator_max_tokens_count(tmp_path: Path) -> None:
    async with serving(tmp_path, output_length_estimator="none") as s:
        requests = [text_request(expected_tokens=expected) for expected in (None, None, 3)]
        assert await expected_tokens(s, *requests) == [0, 0, 3]


class _Custom:
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def estimate(self, shape: AnswerShape) -> int:
        if len(self.seen) >= 2:
            raise RuntimeError("no model")
        return shape.prompt_tokens * 2

    def observe(self, shape: AnswerShape, output_tokens: int) -> None:
        self.seen.append((shape.tenant, output_tokens))


async def test_own_estimator_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    custom = _Custom()
    module = types.ModuleType("own_estimator")
    module.build = lambda: custom  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_estimator", module)
    with structlog.testing.capture_logs() as lines:
        async with serving(tmp_path, output_length_estimator="own_estimator:build") as s:
            found = await expected_tokens(s, *[text_request("a b c")] * 4)
            prompt = len(s.engine.submitted[0].prompt)
            assert found == [2 * prompt, 2 * prompt, 0, 0]
            assert custom.seen == [("", 6)] * 4
    assert [line["event"] for line in lines].count("estimator_failed") == 1


@pytest.mark.parametrize("name", ["nothing_of_this_name:build", "json:build", "json:loads"])
def test_estimator_that_cannot_be_loaded_is_a_configuration_error(name: str) -> None:
    with pytest.raises(ConfigurationError, match="--output-length-estimator"):
        load_estimator(name)
