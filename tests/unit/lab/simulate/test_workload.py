"""Workloads: the shapes that their sources describe, and the same one for every policy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lab.simulate.errors import ScenarioError
from lab.simulate.recorded import read
from lab.simulate.scenario import Scenario
from lab.simulate.sync_colocated import SyncColocated
from lab.simulate.workload import Lengths, Stated, Turn, Turns
from lab.simulate.world import World


def stated(**changes: float) -> Stated:
    return Stated(1, 16, 32, Lengths("tail", 1000, longest=28000, **changes), Turns(), 100, 0.5)


def test_the_longest_reply_is_28_times_the_median() -> None:
    lengths = [t[0].sampled for n in range(512) for t in stated().task(n).episodes]
    assert np.median(lengths) == pytest.approx(1000, rel=0.1)
    assert 24 <= max(lengths) / np.median(lengths) <= 32


def test_the_last_tenth_of_the_replies_takes_half_of_a_synchronous_rollout() -> None:
    """Two calls for every slot of the engines; with fewer calls the tail weighs more."""
    given = Scenario(
        gpus=8,
        gpu="H20",
        model="7B",
        batch=256,
        group=16,
        batches=1,
        warmup=0,
        lengths={"kind": "tail", "median": 800, "longest": 28000},
    )
    ends: list[float] = []

    class Noting(World):
        def _turn_over(self, sample: object) -> None:
            ends.append(self.now)
            super()._turn_over(sample)  # type: ignore[arg-type]

    Noting(given, SyncColocated(), given.workload(0)).run()
    ends.sort()
    assert 0.4 <= 1 - ends[len(ends) * 9 // 10] / ends[-1] <= 0.65


def test_a_group_is_a_function_of_seed_and_number() -> None:
    assert stated().task(7) == stated().task(7)
    assert stated().task(7) != stated().task(8)


def test_replies_grow_with_the_batch() -> None:
    early, late = (np.mean([stated(growth=0.1).task(32 * b + n).sampled for n in range(32)]) for b in (0, 20))
    assert late > 3 * early


def test_a_recorded_workload_is_read_and_run(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    turns = [{"prompt": 10, "sampled": 20, "wait_s": 1.0}, {"prompt": 5, "sampled": 30}]
    path.write_text("\n".join(json.dumps({"episodes": [turns, turns[:1]]}) for _ in range(3)))
    assert read(path)[0].episodes == ((Turn(10, 20, 1.0), Turn(5, 30)), (Turn(10, 20, 1.0),))
    given = Scenario(gpus=4, batch=2, batches=3, warmup=1, recorded=path)
    meter = World(given, SyncColocated(), given.workload(0)).run()
    assert meter.tokens == [140, 140, 140]


def test_an_exported_run_is_a_workload(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        ("g", "a", False, [1] * 7),
        ("g", "a", True, [2] * 5),
        ("g", "a", False, [3] * 2),
        ("g", "a", True, [4] * 6),
    ]
    names = ["group_id", "episode_id", "sampled", "ids"]
    pq.write_table(
        pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows]), tmp_path / "x.parquet"
    )
    assert read(tmp_path / "x.parquet")[0].episodes == ((Turn(7, 5), Turn(2, 6)),)


def test_a_workload_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"episode": []}')
    with pytest.raises(ScenarioError, match=r"bad\.jsonl"):
        read(tmp_path / "bad.jsonl")
