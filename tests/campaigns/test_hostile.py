"""Short runs of the campaign of hostile callers, and checks that it detects lost and altered answers."""

from __future__ import annotations

import json
from pathlib import Path

from campaigns import hostile


def test_canary_reads_beside_hostile_callers(folder: Path) -> None:
    campaign = hostile.Campaign(folder)
    try:
        for kind in ("calm", "detokenize_flood", "cancel_storm", "frames_of_resets"):
            found = campaign.run(kind, 0.5)
            assert hostile.faults(found) == [], json.dumps(found)
    finally:
        exit_code = campaign.end()
    assert exit_code == 0


def test_idle_callers_are_a_fault() -> None:
    found = {"kind": "detokenize_flood", "times": 9, "outcomes": {"OK": 1}, "callers_failed": 0, "answers": 1}
    found |= {"wrong": "", "stood_still": False}
    assert hostile.faults(found) == []
    for field, value, fault in (
        ("times", 0, "times"),
        ("outcomes", {"INVALID_ARGUMENT": 9}, "served"),
        ("callers_failed", 1, "callers_failed"),
        ("answers", 0, "answers"),
        ("stood_still", True, "stood_still"),
        ("wrong", "the canary's answer failed or differed", "wrong"),
    ):
        assert hostile.faults({**found, field: value}) == [fault]
    assert hostile.faults({**found, "kind": "cancel_storm", "outcomes": {}}) == []
