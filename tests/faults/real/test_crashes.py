"""A short seeded run: faults of every kind hit a small cluster, and nothing is lost or doubled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.real.crashes import play, small
from tests.faults.real.faults import KINDS
from tests.faults.real.plan import Plan


@pytest.mark.long
async def test_faults_lose_and_double_nothing(tmp_path: Path) -> None:
    values, report = await play(small(Plan(seed=1, forked=True)), tmp_path, print)
    assert report.right, report.findings
    assert values["problems"] == []
    assert values["calls"] > 0
    assert values["faults"].keys() >= {kind.name for kind in KINDS if kind.needs != "server"}
