"""The bench of the control program runs, and counts what it does. No figure is asserted."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.control import Plan, measure


@pytest.mark.long
def test_the_control_program_is_measured(tmp_path: Path) -> None:
    plan = Plan(engines=8, calls=400, call_s=2.0, episode_calls=2, group=4, tick_ms=20)
    result = measure(plan, 3.0, tmp_path)
    assert result["open_calls"] > 350, "calls that end are replaced and placed"
    assert 300 < result["left_per_s"] * 3 < 900
    assert result["refused_per_s"] == 0
    assert set(result["events_per_s"]) == {"calls", "batch", "snapshot"}
    assert result["share_of_a_core"] > 0
    assert result["recording_mb_per_s"] > 0
