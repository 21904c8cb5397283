"""The demo's model learns from its users, who are there all day, on real vLLM: no driver, no tasks, no rewards of the agent.

    python -m examples.live.run                 # what `make demo NAME=live` does
    python -m examples.live.run --seed 2 --dir runs/other

Model, sums and gateway are those of `examples.demo`, with two engines. Users (`users.py`) call the gateway with a lasting key all
the time. Each version is first tried on a quarter of the new conversations (`[update] canary`). One version is poisoned
(`poisoned.py`), and during its trial the gateway is killed with SIGKILL and started again. The last line has the mean reward of
greedy replies to held-out sums before and after, the share of conversations that the poisoned version had from its publication to
its return, whether it was returned, and the users' failed requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sqlite3
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo.run import Demo, console
from examples.live.users import Users
from headgate.client import GatewayClient
from headgate.processes.child import LocalProcess
from headgate.processes.interrupts import run_interruptible
from headgate.weights import folders

KEY = "the-key-of-the-live-demo"
SHARE = 0.25
_BATCH = 128
_POISONED_LR = 5e-3
_AGENT = f"""
[agents.live]
key = "{KEY}"
mode = "train"
group_size = 1
live = true
idle_s = 6

[graders.next]
function = "examples.live.users:satisfied"

[update]
canary = {SHARE}
canary_conversations = 60
"""


@dataclass
class LiveDemo(Demo):
    """A run whose episodes are opened by users."""

    good_steps: int = 6
    """Steps before the poisoned one."""
    more_steps: int = 3
    """Steps after it."""
    gateway: LocalProcess | None = None

    async def run(self) -> dict[str, Any]:
        """Serve and train; return the summary."""
        users = Users(self.url, KEY, self.seed)
        try:
            async with self.serving():
                return await self._with(users)
        finally:
            if self.gateway is not None:
                await self.gateway.stop()

    async def _with(self, users: Users) -> dict[str, Any]:
        before = await self.timed("evaluate before", self.evaluate("before"))
        talking = asyncio.create_task(users.talk(), name="users")
        try:
            await self.timed("train", self._train(self.good_steps))
            trial = await self.timed("poisoned version", self._poison(self.good_steps + 1))
            await self.timed("train on", self._train(self.good_steps + 1 + self.more_steps))
        finally:
            talking.cancel()
            with suppress(asyncio.CancelledError):
                await talking
        after = await self.timed("evaluate after", self.evaluate("after"))
        async with GatewayClient(self.url) as client:
            trials = (await client.canary())["ended"]
        touched, during = self._touched(trial)
        return {
            "before": before["reward_mean"],
            "after": after["reward_mean"],
            "poisoned_share": round(touched / max(1, during), 4),
            "rolled_back": trial["outcome"] == "returned",
            "failed_requests": users.failures.total(),
            "poisoned": {"conversations": touched, "of": during, "why": trial["why"]},
            "trials": Counter(row["outcome"] for row in trials),
            "failures": dict(users.failures.most_common(3)),
            "users": dict(users.counts),
            "seconds": self.seconds,
        }

    async def start_gateway(self) -> LocalProcess:
        """Start it as every demo does, and remember it, so that it can be killed."""
        self.gateway = await super().start_gateway()
        return self.gateway

    async def _train(self, steps: int) -> None:
        await self.command("trainer.cli", "run", self.path("live.toml"), "--set", f"run.steps={steps}")

    async def _poison(self, version: int) -> dict[str, Any]:
        """Publish a poisoned version, and kill the gateway during its trial; return the trial."""
        changes = [f"run.steps={version}", f"optimizer.lr={_POISONED_LR}"]
        sets = [part for change in changes for part in ("--set", change)]

        async def publish() -> None:
            with suppress(
                SystemExit
            ):  # the trainer stops, because its version is bad; in a task it would end the loop
                await self.command("examples.live.poisoned", "run", self.path("live.toml"), *sets)

        publishing = asyncio.create_task(publish(), name="poisoned")
        async with GatewayClient(self.url) as client:
            while not (running := (await client.canary())["running"]) or not _conversations(running):  # noqa: ASYNC110
                await asyncio.sleep(0.5)
            assert running["version"] == version
            assert self.gateway is not None
            console.print(f"[bold]$ kill -9 {self.gateway.pid}[/bold]   (the gateway, during the trial)")
            self.gateway.kill()
            await self.gateway.wait()
            await self.timed("start engine and gateway again", self.start_gateway())
            while (await client.canary())["running"]:  # noqa: ASYNC110
                await asyncio.sleep(1.0)
            trial: dict[str, Any] = (await client.canary())["ended"][0]
        await publishing
        checkpoint = Path(self.path("trainer"), "checkpoints", folders.name_of(version))
        if checkpoint.exists():  # as its message requests
            shutil.rmtree(checkpoint)
        return trial

    def _touched(self, trial: dict[str, Any]) -> tuple[int, int]:
        """Return the conversations that a trial's version sampled a token of, and those that were opened during the trial."""
        with closing(sqlite3.connect(f"file:{self.path('gateway.db')}?mode=ro", uri=True)) as store:
            rows = store.execute("SELECT episode_id, spans FROM nodes WHERE sampled").fetchall()
            during = store.execute(
                "SELECT count(*) FROM episodes WHERE agent <> '' AND created_at BETWEEN ? AND ?",
                (trial["began_at"], trial["ended_at"]),
            ).fetchone()[0]
        versions = ((episode, json.loads(spans)) for episode, spans in rows)
        return len({e for e, spans in versions if any(s[0] == trial["version"] for s in spans)}), during

    def configure(self) -> None:
        """Write also the agent of the users, and a trainer's file without a driver; that of the demo is for evaluation."""
        super().configure()
        gateway, trainer = Path(self.path("gateway.toml")), Path(self.path("trainer.toml"))
        text = gateway.read_text()
        assert "batch = 16 " in text
        text = text.replace("batch = 16 ", f"min_members = 1\nbatch = {_BATCH} ")
        text = text.replace('launch = "vllm"', 'launch = "vllm"\ncount = 2')
        gateway.write_text(text + _AGENT)
        own = trainer.read_text().partition("[rollout]")[0].replace('type = "grpo"', 'type = "reinforce++"')
        Path(self.path("live.toml")).write_text(own)


def _conversations(running: dict[str, Any]) -> int:
    """Return the ended conversations of a trial's candidate."""
    return int(running["figures"]["candidate"]["conversations"])


def main() -> None:
    """Run the demo once."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, help="of the users and the training")
    parser.add_argument("--dir", type=Path, default=Path("runs/live"), help="it is emptied first")
    parser.add_argument("--steps", type=int, default=6, help="before the poisoned version")
    parser.add_argument("--more", type=int, default=3, help="steps after it")
    given = parser.parse_args()
    demo = LiveDemo(given.dir, given.seed, good_steps=given.steps, more_steps=given.more)
    summary = run_interruptible(demo.run(), console.print, "stopping the trainer, the gateway and vLLM")
    (given.dir / "summary.json").write_text(json.dumps(summary))
    first = ("before", "after", "poisoned_share", "rolled_back", "failed_requests")
    print(json.dumps({name: value for name, value in summary.items() if name not in first}))
    print(json.dumps({name: summary[name] for name in first}))


if __name__ == "__main__":
    main()
