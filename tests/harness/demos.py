"""The demos with tools in small: their model with one layer, and episodes in which the engine samples what a test sets."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

from headgate.client import EpisodeOutcome, EpisodeRunner, load_agent
from headgate.client.agents import Task
from trainer.commands import warmstart


def small_model(recipe: Path, folder: Path) -> Path:
    """Return the model of a demo's recipe in small, with a tokenizer of fewer examples: to train it takes the most time."""
    small = {"steps": 1, "rows": 2, "layers": 1, "hidden": 32, "intermediate": 32, "threads": 1}
    loaded = warmstart.Recipe.load(recipe).model_copy(update=small)
    with mock.patch.object(warmstart, "_TOKENIZER_SAMPLES", 200):
        warmstart.warm_start(loaded, folder / "model", cache=folder / "cache")
    return folder / "model"


async def play(
    gateway: Any, engine: Any, agent: str, task: dict[str, Any], replies: Iterable[str]
) -> EpisodeOutcome:
    """Return an episode of `agent` in which the model samples `replies`, all of them."""
    engine.replies.extend(replies)
    runner = EpisodeRunner(gateway.admin, load_agent(agent), mode="eval")
    [outcome] = await runner.run([Task(task["task_id"], task)])
    assert not engine.replies
    assert outcome.error is None
    return outcome
