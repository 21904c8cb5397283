"""The demo's model learns from its users, who are there all day, on real vLLM: no driver, no tasks, no rewards of the agent.

    python -m examples.live.run                 # what `make demo NAME=live` does
    python -m examples.live.run --seed 2 --dir runs/other

Model, sums and gateway are those of `examples.demo`. Users (`users.py`) call the gateway with a lasting key before, during and
after each update. The last line has the mean reward of greedy replies to held-out sums before and after, the newest conversations
by mode and notice, and the users' failed requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from examples.demo.run import Demo, console
from examples.live.users import Users
from headgate.client import GatewayClient
from headgate.processes.interrupts import run_interruptible

KEY = "the-key-of-the-live-demo"
_BATCH = 128
_AGENT = f"""
[agents.live]
key = "{KEY}"
mode = "train"
group_size = 1
live = true
idle_s = 10

[graders.next]
function = "examples.live.users:satisfied"
"""


class LiveDemo(Demo):
    """A run whose episodes are opened by users."""

    async def run(self) -> dict[str, Any]:
        """Serve and train; return the summary."""
        users = Users(self.url, KEY, self.seed)
        async with self.serving():
            before = await self.timed("evaluate before", self.evaluate("before"))
            talking = asyncio.create_task(users.talk(), name="users")
            try:
                await self.timed("train", self.command("trainer.cli", "run", self.path("live.toml")))
            finally:
                talking.cancel()
                with suppress(asyncio.CancelledError):
                    await talking
            after = await self.timed("evaluate after", self.evaluate("after"))
            async with GatewayClient(self.url) as client:
                conversations = Counter(
                    " ".join(filter(None, (row["mode"], row["notice"])))
                    for row in await client.episodes(agent="live", limit=1000)
                )
        return {
            "before": before["reward_mean"],
            "after": after["reward_mean"],
            "failed_requests": users.failures.total(),
            "failures": dict(users.failures.most_common(3)),
            "users": dict(users.counts),
            "newest_conversations": dict(conversations),
            "seconds": self.seconds,
        }

    def configure(self) -> None:
        """Write also the agent of the users, and a trainer's file without a driver; that of the demo is for evaluation."""
        super().configure()
        gateway, trainer = Path(self.path("gateway.toml")), Path(self.path("trainer.toml"))
        text = gateway.read_text()
        assert "batch = 16 " in text
        gateway.write_text(text.replace("batch = 16 ", f"min_members = 1\nbatch = {_BATCH} ") + _AGENT)
        own = trainer.read_text().partition("[rollout]")[0].replace('type = "grpo"', 'type = "reinforce++"')
        Path(self.path("live.toml")).write_text(own)


def main() -> None:
    """Run the demo once."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, help="of the users and the training")
    parser.add_argument("--dir", type=Path, default=Path("runs/live"), help="it is emptied first")
    given = parser.parse_args()
    demo = LiveDemo(given.dir, given.seed)
    summary = run_interruptible(demo.run(), console.print, "stopping the trainer, the gateway and vLLM")
    (given.dir / "summary.json").write_text(json.dumps(summary))
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
