"""The demo with tools: its split, its scorer, the habits of its teacher; and the runner that it shares with the demo."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from examples.demo.report import abandoned_requests, components, failed_requests
from examples.demo.run import SUMS, Demo, Job
from examples.frozen_lake.run import LAKE
from examples.tools_demo import tasks, teacher
from examples.tools_demo.run import SHOP
from trainer.config.settings import Settings


def orders_of(split: tasks.Split, seed: int, count: int) -> list[str]:
    return [task["question"] for task in itertools.islice(tasks.tasks(split, seed), count)]


def test_no_order_is_in_both_splits_and_the_teacher_sees_none_that_is_held_out() -> None:
    held_out = set(orders_of("heldout", 99, 500))
    seen = set(orders_of("train", 1, 4000))
    seen |= {e["messages"][1]["content"] for e in itertools.islice(teacher.careless_teacher(1), 4000)}
    assert len(held_out) > 250
    assert not held_out & seen


def test_a_total_is_the_sum_of_the_tools_prices() -> None:
    for task in itertools.islice(tasks.tasks("heldout", 3), 100):
        order = task["question"].splitlines()[1:]
        assert tasks.FEWEST <= len(order) == len(set(order)) <= tasks.MOST
        assert task["total"] == sum(task["prices"][item] for item in order)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("4 7 12", 1.0),
        ("12", 1.0),
        ("The total is 12.", 1.0),
        ("12 7", 0.0),
        ("112", 0.0),
        ("", 0.0),
        ("none", 0.0),
    ],
)
def test_the_last_number_is_the_answer(answer: str, reward: float) -> None:
    assert tasks.score({"total": 12}, answer) == reward


@pytest.mark.parametrize("job", [SUMS, SHOP, LAKE], ids=lambda job: job.package)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_run_has_its_own_folder_port_and_seed(job: Job, frozen: bool, tmp_path: Path) -> None:
    Demo(tmp_path, 7, frozen, job, port=4711).configure()
    trainer = Settings.load(tmp_path / "trainer.toml")
    gateway = (tmp_path / "gateway.toml").read_text()
    assert (trainer.run.seed, trainer.gateway.url) == (7, "http://127.0.0.1:4711")
    assert (trainer.optimizer.lr == 0.0) is frozen
    assert trainer.rollout is not None
    assert trainer.rollout.agent.startswith(job.package)
    assert {trainer.run.dir, trainer.model.path, trainer.rollout.tasks} == {
        tmp_path / name for name in ("trainer", "model", "train.jsonl")
    }
    assert "port = 4711" in gateway
    assert f"{job.runs}/" not in gateway
    assert gateway.count(str(tmp_path)) == 4


def test_a_summary_has_the_means_of_the_components() -> None:
    outcomes = [{"components": {"tool_calls": 2.0}}, {"components": {"tool_calls": 3.0}}, {"components": {}}]
    assert components({"outcomes": outcomes}, "before") == {"tool_calls_before": 2.5}
    assert components({"outcomes": [{"components": {}}]}, "after") == {}


def test_failures_are_server_errors_and_failed_episodes_and_nothing_else() -> None:
    metrics = """
headgate_errors_total{code="busy",status="429"} 5.0
headgate_errors_total{code="engine",status="503"} 2.0
headgate_calls_total{api="chat",finish="stop"} 9.0
headgate_calls_total{api="chat",finish="abandoned"} 4.0
"""
    episodes = {
        "train/closed/rewarded": 90,
        "train/closed/surplus": 7,
        "train/closed/agent_failed": 4,
        "train/closed/idle_deadline": 1,
        "eval/closed/agent_failed": 3,
    }
    facts = {"metrics": metrics, "status": {"episodes": episodes}}
    assert failed_requests(facts, {"failed": 0}, {"failed": 3}) == 2 + 4 + 1 + 3
    assert abandoned_requests(metrics) == 4
