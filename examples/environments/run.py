"""The demo's model trained through `--env reasoning-gym:chain_sum`: nothing of ours but the model.

    python -m examples.environments.run            # what `make demo NAME=environments` does; about 20 minutes on two cores

The model, the gateway and the runner are those of `examples.demo`; the control has a learning rate of 0. What is held out is
held out by the adapter's rule, by the question's text; the warm start's teacher never showed these questions either.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo.run import Demo, Job, run_demos
from examples.demo.seeds import SEEDS, show

CHAIN_SUM = Job(
    "examples.environments", "A model trained through reasoning-gym's chain_sum", "runs/environments"
)


@dataclass
class EnvironmentDemo(Demo):
    """The demo without task files: the environment has its own."""

    async def prepare(self) -> None:
        """Make the model, or copy it from the cache."""
        recipe = str(self.job.folder / "warmstart.toml")
        await self.command("trainer.cli", "warmstart", "--recipe", recipe, "--out", self.path("model"))

    async def evaluate(self, name: str) -> dict[str, Any]:
        """Evaluate greedy replies to the environment's held-out tasks."""
        out = self.path(f"eval-{name}.json")
        await self.command("trainer.cli", "eval", self.path("trainer.toml"), "--json", out)
        result: dict[str, Any] = json.loads(Path(out).read_text())
        return result


def main() -> None:
    """Run all, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path(CHAIN_SUM.runs))
    directory = parser.parse_args().dir
    runs = [EnvironmentDemo(directory / f"seed-{seed}", seed, job=CHAIN_SUM) for seed in SEEDS]
    runs.append(EnvironmentDemo(directory / "control", SEEDS[0], True, CHAIN_SUM))
    show(run_demos(runs), directory)


if __name__ == "__main__":
    main()
