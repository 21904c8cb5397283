"""`trainer run` as a user starts it: it brings up the gateway before real vLLM and the agents, trains, and stops them.

Trainer and gateway are forked from a process that has imported what they do.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from functools import partial
from pathlib import Path

import pytest

from examples.demo.task_file import write_tasks
from examples.demo.tasks import tasks
from headgate.processes.ports import free_port
from tests.harness import uneven_agent
from tests.harness.forked_programs import forked
from tests.harness.forks import command
from tests.harness.vllm import SharedEngine

pytestmark = pytest.mark.vllm

STEPS = 3
NOISE = 2e-3
"""Nats between two float32 implementations of the same weights."""

GATEWAY = """
[server]
port = {port}
[models.sums]
path = "{model}"
[engine]
launch = "external"
url = "{engine}"
[sampling]
temperature = {{ override = 1.0 }}
[staleness]
eta = 0
batch = 4
[store]
url = "sqlite:///{work}/gateway.db"
"""
TRAINER = """
[run]
dir = "{work}/run"
steps = {steps}
device = "cpu"
threads = 1
[gateway]
config = "{work}/gateway.toml"
[model]
path = "{model}"
[optimizer]
lr = 1e-3
[rollout]
agent = "{agent}"
tasks = "{work}/tasks.jsonl"
group_size = 4
concurrency = 16
"""


async def test_a_run_from_the_command_line_trains_on_what_was_sampled(
    vllm: SharedEngine, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {
        "agent": f"{uneven_agent.__name__}:solve",
        "engine": vllm.url,
        "model": tiny_model,
        "port": free_port(),
        "steps": STEPS,
        "work": tmp_path,
    }
    (tmp_path / "gateway.toml").write_text(GATEWAY.format(**names))
    (tmp_path / "trainer.toml").write_text(TRAINER.format(**names))
    options = ("--split", "train", "--count", "64", "--out", f"{tmp_path}/tasks.jsonl")
    monkeypatch.setattr(sys, "argv", ["tasks", *options])
    write_tasks("The demo's tasks", tasks)
    async with forked(tmp_path / "forks") as environ:
        arguments = ("run", f"{tmp_path}/trainer.toml")
        running = partial(command, "trainer.cli", *arguments, folder=tmp_path, environ=environ)
        status, output = await asyncio.to_thread(running)
    assert status == 0, output[-6000:]

    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["version"] for record in records] == [1, 2, 3]
    for record in records:
        assert (record["reward_mean"], record["equal_reward_groups"], record["staleness_max"]) == (0.5, 0, 0)
        assert 0 < record["same_version_tokens"] == record["trained_tokens"]
        assert record["logprob_gap_max"] < NOISE
    with sqlite3.connect(tmp_path / "gateway.db") as store:
        versions = store.execute("SELECT version, state, report FROM versions ORDER BY version").fetchall()
        abandoned = store.execute(
            "SELECT count(*) FROM calls JOIN episodes ON episodes.id = episode_id"
            " WHERE finish_reason = 'abandoned' AND reason != 'interrupted'"
        ).fetchone()
    assert [(version, state) for version, state, _ in versions] == [(v, "live") for v in range(STEPS + 1)]
    verdicts = [json.loads(report)[0]["probe"]["verdict"] for _, _, report in versions[1:]]
    assert set(verdicts) <= {"passed", "indistinct"}
    assert abandoned == (0,)
