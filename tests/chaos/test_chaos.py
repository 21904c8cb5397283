"""A short seeded run: faults of every kind hit a small cluster, and nothing is lost or doubled."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.__main__ import play, small
from tests.chaos.checker import COUNTS
from tests.chaos.faults import KINDS, schedule
from tests.chaos.system import Plan


def test_the_same_seed_plans_the_same_faults() -> None:
    plan = small(Plan(seed=3))
    planned = [(at, kind.name, random.random()) for at, kind, random in schedule(plan)]
    assert planned == [(at, kind.name, random.random()) for at, kind, random in schedule(plan)]
    assert {name for _, name, _ in planned} == {kind.name for kind in KINDS}
    assert planned != [(at, kind.name, random.random()) for at, kind, random in schedule(small(Plan(seed=4)))]


async def test_faults_lose_and_double_nothing(tmp_path: Path) -> None:
    values = await play(small(Plan(seed=1)), tmp_path, print)
    found = {count: values[count] for count in COUNTS}
    assert found == dict.fromkeys(COUNTS, 0), values["findings"]
    assert values["problems"] == []
    assert values["calls"] > 0
    assert values["faults"].keys() >= {kind.name for kind in KINDS}
