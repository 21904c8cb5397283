"""A short seeded run: faults of every kind hit a small cluster, and nothing is lost or doubled."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.faults.evidence import Journal, lines
from tests.faults.real import faults
from tests.faults.real.crashes import play, small
from tests.faults.real.faults import KINDS, Kind, inflict, schedule
from tests.faults.real.system import Plan, System


def test_the_same_seed_plans_the_same_faults() -> None:
    plan = small(Plan(seed=3))
    planned = [(at, kind.name, random.random()) for at, kind, random in schedule(plan)]
    assert planned == [(at, kind.name, random.random()) for at, kind, random in schedule(plan)]
    assert {name for _, name, _ in planned} == {kind.name for kind in KINDS if kind.needs != "server"}
    assert planned != [(at, kind.name, random.random()) for at, kind, random in schedule(small(Plan(seed=4)))]


async def test_a_fault_waits_for_its_victim_and_is_named_if_it_cannot_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "_AGAIN_S", 0.0)
    tries = 0

    async def third_time(_: Any, __: Random) -> dict[str, Any] | None:
        nonlocal tries
        tries += 1
        return {"who": "engine-0"} if tries == 3 else None

    async def never(_: Any, __: Random) -> dict[str, Any] | None:
        return None

    async def breaks(_: Any, __: Random) -> dict[str, Any] | None:
        raise RuntimeError("no such thing")

    late, dead, broken = Kind("late", 1, third_time), Kind("never", 1, never), Kind("broken", 1, breaks)
    system = System(Plan(seconds=0.0), tmp_path, lambda _: None)
    with Journal(tmp_path / "faults.jsonl") as journal:
        assert await inflict(system, journal, [(0.0, late, Random(0))]) == []
        monkeypatch.setattr(faults, "_PATIENCE_S", 0.2)
        problems = await inflict(system, journal, [(0.0, kind, Random(0)) for kind in (dead, broken)])
    assert problems == [
        "the fault never could not be done: its victim was dead for 0.2 s",
        "the fault broken could not be done: RuntimeError('no such thing')",
    ]
    ends = {row["fault"]: row["kind"] for row in lines(tmp_path / "faults.jsonl") if row["kind"] != "begin"}
    assert ends == {"late": "end", "never": "not_done", "broken": "not_done"}


async def test_faults_lose_and_double_nothing(tmp_path: Path) -> None:
    values, report = await play(small(Plan(seed=1, forked=True)), tmp_path, print)
    assert report.right, report.findings
    assert values["problems"] == []
    assert values["calls"] > 0
    assert values["faults"].keys() >= {kind.name for kind in KINDS if kind.needs != "server"}
