"""The demo's model trained through `--env verifiers:till`, an environment of verifiers with its own dataset, rubric and harness.

    python -m examples.verifiers.run            # what `make demo NAME=verifiers` does; about 25 minutes on two cores

What a user types, in that order and timed: a few episodes to look at, `trainer run --dry-run`, and the training between two
evaluations. The environment (`examples/verifiers/environment`) imports nothing of headgate and lives in the Python that has
verifiers. Nothing is of headgate but the model, whose warm start saw none of the environment's questions.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from examples.demo.run import Job, run_demos
from examples.demo.seeds import SEEDS, show
from examples.environments.run import EnvironmentDemo

TILL = Job("examples.verifiers", "A model trained through an environment of verifiers", "runs/verifiers")
LOOKED_AT = 8
"""Episodes before the training."""
STEPS = (
    "start engine and gateway",
    "first episodes",
    "dry run",
    "evaluate before",
    "train",
    "evaluate after",
    "total",
)


@dataclass
class VerifiersDemo(EnvironmentDemo):
    """The demo with an environment, tried before it is trained on."""

    job: Job = TILL
    variables: ClassVar[dict[str, str]] = {"PYTHONPATH": str(TILL.folder / "environment")}
    """In place of `pip install` of the environment into verifiers' Python."""

    async def try_out(self) -> None:
        """Play a few episodes that are never trained, and check that training has something to learn."""
        await self.timed("first episodes", self.command("gateway.cli", "episodes", "run", *self.look()))
        dry = self.command("trainer.cli", "run", self.path("trainer.toml"), "--dry-run")
        await self.timed("dry run", dry)

    def look(self) -> list[str]:
        """Return the arguments of the first episodes."""
        block = {"agent": {"runtime": {"type": "subprocess"}}, "sampling": {"max_tokens": 16}}
        python = ".venv-environments/verifiers/bin/python"
        return [
            *("--env", "verifiers:till", "--env-python", python, "--env-args", json.dumps(block)),
            *("--mode", "eval", "--limit", str(LOOKED_AT), "--gateway", self.url),
        ]


def show_minutes(summaries: list[dict[str, Any]]) -> None:
    table = Table(title="minutes by step")
    table.add_column("run")
    for step in STEPS:
        table.add_column(step, justify="right")
    for summary in summaries:
        name = "control (frozen)" if summary["frozen"] else f"seed {summary['seed']}"
        table.add_row(name, *(f"{summary['seconds_by_step'][step] / 60:.1f}" for step in STEPS))
    Console().print(table)


def main() -> None:
    """Run all, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path(TILL.runs))
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    options = parser.parse_args()
    runs = [VerifiersDemo(options.dir / f"seed-{seed}", seed) for seed in options.seeds]
    runs.append(VerifiersDemo(options.dir / "control", options.seeds[0], True))
    summaries = run_demos(runs)
    show_minutes(summaries)
    show(summaries, options.dir)


if __name__ == "__main__":
    main()
