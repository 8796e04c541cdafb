"""Errors of UpdateScheduling that the client finds: an unknown setting, or a value of another type."""

from __future__ import annotations

import pytest

from lineclear.client.admin_results import update_scheduling_request
from lineclear.errors import InvalidRequest


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("max_batch_size", "abc", "changes.max_batch_size: must be a whole number"),
        ("max_batch_sise", 3, "changes.max_batch_sise: is no scheduling setting; is it max_batch_size?"),
        ("colour", 3, "changes.colour: is no scheduling setting; there are batching_strategy, "),
    ],
)
def test_unknown_setting_and_wrong_value_have_their_own_sentences(name: str, value: str | int, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        update_scheduling_request({name: value})
    assert str(caught.value).startswith(says)
