"""The demo of `examples.demo` with TRL in place of headgate's trainer: `python -m examples.trl.run` (`make demo NAME=trl`)."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from examples.demo.run import Demo, run_demos
from headgate.processes.child import LocalProcess

_GROUPS, _MEMBERS = 16, 8
_TRAIN_S = 3600.0


class TrlDemo(Demo):
    """A run whose batches TRL trains; the driver runs the demo's agent."""

    steps = 30

    async def run(self) -> dict[str, Any]:
        """Train and evaluate; return the summary."""
        async with self.serving():
            before = await self.evaluate("before")
            driver = await LocalProcess.start("driver", self._driver(), Path(self.path("driver.log")))
            try:
                await self._train()
            finally:
                await driver.stop()
            after = await self.evaluate("after")
            status = (await self.gateway_facts())["status"]
        return {
            "before": before["reward_mean"],
            "after": after["reward_mean"],
            "version": status["version"],
        }

    def _driver(self) -> list[str]:
        # fmt: off
        return [
            sys.executable, "-m", "gateway.cli", "episodes", "run", "--forever", "--gateway", self.url,
            "--agent", "examples.demo.agent:solve", "--tasks", self.path("train.jsonl"),
            "--group-size", str(_MEMBERS), "--concurrency", "128",
        ]
        # fmt: on

    async def _train(self) -> None:
        sizes = ["--groups", str(_GROUPS), "--group-size", str(_MEMBERS), "--steps", str(self.steps)]
        argv = [".venv-trl/bin/python", "-m", "examples.trl.train", self.url, self.path("versions"), *sizes]
        trainer = await LocalProcess.start("trl", [*argv, "--lr", "2e-4"], Path(self.path("trl.log")))
        async with asyncio.timeout(_TRAIN_S):
            code = await trainer.wait()
        if code:
            raise SystemExit(f"TRL ended with {code}: {self.path('trl.log')}")


def main() -> None:
    """Run the demo once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the tasks' order")
    parser.add_argument("--dir", type=Path, default=Path("runs/trl"), help="it is emptied first")
    given = parser.parse_args()
    (summary,) = run_demos([TrlDemo(given.dir, given.seed)])
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
