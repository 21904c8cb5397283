"""The example of lending with fake engines: the lent node's roles are in its figures, and the figures are the recording's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from examples.lending import run, tasks
from examples.lending.cluster import TOPOLOGIES, Run
from tests.harness import uneven_agent

MIXED = next(topology for topology in TOPOLOGIES if topology.name == "mixed")


@pytest.mark.long
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each node is a core")
async def test_a_train_node_is_lent_in_the_example(tiny_model: Path, tmp_path: Path) -> None:
    found = tmp_path / "tasks.jsonl"
    given = [task for _, task in zip(range(64), tasks.tasks(1), strict=False)]
    found.write_text("".join(json.dumps(task) + "\n" for task in given))
    work = tmp_path / "mixed"
    agent = f"{uneven_agent.__name__}:solve_of_lending"
    await Run(MIXED, work, tiny_model, found, "fake", steps=3, group_size=2, concurrency=8, agent=agent).run()
    figures = run.measured(work)
    assert figures["steps"] == 2
    assert figures["trained_tokens"] > 0
    assert figures["shares"].keys() == {"r0", "t0"}
    for shares in figures["shares"].values():
        assert sum(shares.values()) == pytest.approx(1.0, abs=0.001)
    assert figures["shares"]["t0"]["train"] > 0  # the trainer had it
    assert figures["shares"]["t0"]["rollout"] > 0  # and it was lent
    assert figures["shares"]["r0"]["train"] == 0


def test_the_score_is_the_share_of_partial_sums_that_follow() -> None:
    task = {"question": "4 + 3 - 2 + 1"}
    assert tasks.score(task, "7 5 6") == 1.0
    assert tasks.score(task, "8 6 7") == pytest.approx(2 / 3)  # one slip, counted once
    assert tasks.score(task, "7") == pytest.approx(1 / 3)
    assert tasks.score(task, "no idea") == 0.0
