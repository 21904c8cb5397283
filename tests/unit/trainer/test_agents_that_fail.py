"""A trainer whose agents fail, or whose groups cannot teach anything: it ends and reports why, or warns."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headgate.processes.errors import ChildDied
from tests.harness.gateways import RunningGateway
from tests.harness.waiting import within
from trainer.config.settings import Settings
from trainer.errors import ConfigError, TooManyFailed
from trainer.loop.run import run, warn_single_episode_groups
from trainer.model.device import cpu_warning
from trainer.report.metrics import Metrics
from trainer.state.directory import exclusive


def settings_of(
    tmp_path: Path, url: str, model: Path, limits: dict[str, Any] | None = None, **rollout: Any
) -> Settings:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(f'{{"task_id": "t{i}"}}\n' for i in range(30)))
    agent = {"agent": "tests.unit.trainer.rollouts:broken", "tasks": tasks, "concurrency": 8}
    return Settings.parse({
        "run": {"dir": tmp_path / "run", "steps": 2, "device": "cpu", "threads": 1, **(limits or {})},
        "gateway": {"url": url},
        "model": {"path": model},
        "optimizer": {"lr": 1e-3},
        "rollout": {**agent, **rollout},
    })  # fmt: skip


async def test_a_trainer_ends_with_a_sentence_when_its_agents_always_fail(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path
) -> None:
    """Driver and trainer have the same bound; either may be first."""
    words = r"stopped, because 20 of the last 20 episodes failed.*the last error: ValueError: boom$"
    with pytest.raises((ChildDied, TooManyFailed), match=words):
        async with within("the trainer is through", 240):
            await run(settings_of(tmp_path, gateway.url, tiny_model, group_size=2))
    log = (tmp_path / "run" / "rollout.log").read_text()
    assert log.count("Traceback") == 0
    assert log.count("failed: ValueError: boom") == 1
    closed = await gateway.admin.episodes(state="closed", limit=100)
    failed = [row for row in closed if row["reason"] == "agent_failed"]
    assert 20 <= len(failed) <= 28
    assert all(row["error"].startswith("ValueError: boom\nTraceback") for row in failed)


def test_the_live_view_reports_how_the_agents_fare(tmp_path: Path) -> None:
    log = tmp_path / "rollout.log"
    with Metrics(tmp_path, 2, Console(width=200), log) as metrics:
        metrics.collected(0, 16)
        console = Console(width=200, record=True)
        console.print(metrics._table())
        assert "agents" not in console.export_text()
        log.write_text(
            "x" * 10_000 + "\n9 episodes, reward 0.000, 9 failed; the last error: KeyError: [tea]\n\n"
        )
        console.print(metrics._table())
    shown = console.export_text()
    assert "9 failed; the last error: KeyError: [tea]" in shown
    assert "figure" in shown


@pytest.mark.parametrize(("group_size", "warned"), [(1, True), (2, False)])
def test_groups_of_one_warn(tmp_path: Path, group_size: int, warned: bool) -> None:
    settings = settings_of(tmp_path, "http://x", tmp_path, group_size=group_size)
    assert ("every advantage is 0" in warn_single_episode_groups(settings)) is warned


@pytest.mark.parametrize(
    ("device", "weights", "environment", "message"),
    [
        ("auto", 1_000, {}, ""),
        ("auto", 600_000_000, {}, "the model has 600 million weights"),
        ("auto", 1_000, {"NVIDIA_VISIBLE_DEVICES": "1"}, "NVIDIA_VISIBLE_DEVICES = '1' names a GPU"),
        ("auto", 1_000, {"NVIDIA_VISIBLE_DEVICES": "void", "CUDA_VISIBLE_DEVICES": ""}, ""),
        ("cpu", 600_000_000, {"NVIDIA_VISIBLE_DEVICES": "1"}, ""),
    ],
)
def test_a_run_that_falls_back_to_the_cpu_warns(
    tmp_path: Path, device: str, weights: int, environment: dict[str, str], message: str
) -> None:
    settings = settings_of(tmp_path, "http://x", tmp_path)
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"device": device})})
    warning = cpu_warning(settings, weights, environment)
    assert message in warning and bool(warning) is bool(message)


async def test_a_second_trainer_in_the_folder_of_a_run_is_refused_with_the_process_that_has_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Both would write checkpoints and versions there, and take one another's lease."""
    settings = settings_of(tmp_path, "http://127.0.0.1:9", tiny_model)
    with (
        exclusive(settings.run.dir),
        pytest.raises(ConfigError, match=rf"is used by the trainer process {os.getpid()}"),
    ):
        await run(settings)
