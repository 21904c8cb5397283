"""`trainer eval`: one episode per task, outside of training, by the agent of `[rollout]`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gateway.client import EpisodeOutcome, EpisodeRunner, GatewayClient, load_agent
from gateway.client.agents import read_tasks
from trainer.cluster import gateway_process, watch
from trainer.errors import ConfigError
from trainer.settings import Settings


async def evaluate(settings: Settings, tasks: Path, json_out: Path | None = None) -> None:
    """Prints a table, and as the last line of standard output one JSON object. Raises ConfigError without `[rollout]`."""
    if settings.rollout is None:
        raise ConfigError("eval needs [rollout] agent")
    loaded = read_tasks(tasks)
    async with AsyncExitStack() as stack:
        url, gateway = await gateway_process(stack, settings.gateway, settings.run.dir)
        client = await stack.enter_async_context(GatewayClient(url, settings.gateway.key))
        runner = EpisodeRunner(
            client,
            load_agent(settings.rollout.agent),
            group_size=1,
            concurrency=settings.rollout.concurrency,
            mode="eval",
            model=settings.gateway.model,
        )
        version = (await client.status(settings.gateway.model))["version"]
        started = time.monotonic()
        outcomes = await watch(runner.run(loaded), gateway)
        result = summary(outcomes, version, time.monotonic() - started)
    _report(result, outcomes, json_out)


def summary(outcomes: Sequence[EpisodeOutcome], version: int, seconds: float) -> dict[str, Any]:
    """The result; a failed episode counts as a failure, not as a reward of 0. `reward_mean` is None if all failed."""
    rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
    return {
        "reward_mean": round(sum(rewards) / len(rewards), 6) if rewards else None,
        "tasks": len(outcomes),
        "failed": len(outcomes) - len(rewards),
        "seconds": round(seconds, 3),
        "version": version,
    }


def _report(result: dict[str, Any], outcomes: Sequence[EpisodeOutcome], json_out: Path | None) -> None:
    if json_out is not None:
        detail = {**result, "outcomes": [asdict(outcome) for outcome in outcomes]}
        json_out.write_text(json.dumps(detail, indent=1) + "\n")
    console = Console()
    table = Table(title="evaluation")
    for name in result:
        table.add_column(name, justify="right")
    table.add_row(*(str(value) for value in result.values()))
    console.print(table)
    for error in dict.fromkeys(o.error for o in outcomes if o.error):
        console.print(f"failed: {error}", highlight=False, markup=False)
    # rich would wrap the line.
    console.file.write(json.dumps(result) + "\n")
