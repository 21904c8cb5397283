"""A small finished run, as a trainer and agents leave it behind: made in seconds with a fake engine, to look at in the console.

`python -m tests.harness.recorded_run DIR` makes one for people. Every figure by token is a function of its position, so that a
test knows what must be shown.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gateway.cli.demo import save_checkpoint
from headgate.types import Episode, Group, Node
from headgate.used_settings import write_used
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.waiting import LONG_S, until
from tests.harness.weights import publish
from trainer.config.settings import Settings

ADMIN_KEY = "a-key-that-no-page-shows"
STEPS, GROUPS, MEMBERS = 3, 2, 4
RUN = "demo/trainer"
CANNOT_START = (
    "Traceback (most recent call last):\npython: can't open file 'agnet.py': No such file or directory\n"
)
WORDS = ("Count the boats on the river.", "Which mill is upstream?", "Name a stone in the brook.")


@dataclass(frozen=True, slots=True)
class Recorded:
    """The run's folder, and some of its episodes."""

    folder: Path
    trained: list[str]
    """Episodes that a batch was trained on, in order."""
    failed: str
    """An episode whose agent failed."""
    silent: str
    """An episode whose agent could not be started, and sampled nothing."""
    open: str
    """An episode that never ended."""
    evaluated: str


async def record(folder: Path, steps: int = STEPS) -> Recorded:
    """Make a run in a folder: gateway, agents and trainer in one process."""
    model = folder / "model"
    save_checkpoint(model)
    values = settings_for(
        model, folder, staleness={"batch": GROUPS, "eta": 1, "min_members": 1}, server={"public_url": None}
    )
    values["models"]["demo"] |= {"aliases": ["*"], "thinking": False}
    trained: list[str] = []
    async with run_gateway(values) as gateway:
        failed = await _failed(gateway)
        silent, _ = await gateway.open("task-silent", group_id="silent", group_size=1)
        await gateway.admin.abandon(silent, "agent_failed", error=CANNOT_START)
        for step in range(1, steps + 1):
            trained += await _step(gateway, folder, model, step)
        evaluated, headers = await gateway.open("held-out-1", mode="eval")
        await _talk(gateway, headers, 0)
        await gateway.admin.reward(evaluated, 1.0)
        still_open, headers = await gateway.open("task-open", group_id="late", group_size=2)
        await _talk(gateway, headers, 1)
        await until(partial(_all_open, gateway), "the timeline shows that the engine is open")
    _leave_files(folder, model)
    return Recorded(folder, trained, failed, silent, still_open, evaluated)


def _leave_files(folder: Path, model: Path) -> None:
    """Write what a trainer and a gateway leave in addition: settings and a log."""
    settings = Settings.parse(
        {
            "run": {"dir": str(folder / "trainer"), "steps": 40},
            "model": {"path": str(model)},
            "optimizer": {"lr": 2e-6},
            "algorithm": {"type": "dapo"},
            "gateway": {"url": "http://127.0.0.1:8000", "admin_key": ADMIN_KEY},
        }
    )
    write_used(folder / "trainer", "trainer", settings)
    lines = [f"INFO engine demo-0 loads version {n}" for n in range(60)]
    (folder / "gateway.log").write_text("\n".join([*lines, "WARNING engine demo-0 was slow", ""]))


async def _all_open(gateway: RunningGateway) -> bool:
    drawn = (await gateway.http.get("/admin/v1/timeline")).json()
    states = [engine["spans"][-1]["state"] for engine in drawn["engines"]]
    return set(states) == {"open"}


async def _failed(gateway: RunningGateway) -> str:
    episode, headers = await gateway.open("task-broken", group_id="broken", group_size=1)
    await _talk(gateway, headers, 2)
    refused = await gateway.chat(headers, messages=[{"role": "user", "content": "x" * 20_000}], max_tokens=24)
    assert refused.status_code == 400, refused.text
    await gateway.admin.abandon(episode, "agent_failed", error="ZeroDivisionError: division by zero")
    return episode


async def _step(gateway: RunningGateway, folder: Path, model: Path, step: int) -> list[str]:
    """Return a batch: its episodes, its version, and what the trainer reports of it."""
    members: list[str] = []
    for group in range(GROUPS):
        name = f"sums-{step}-{group}"
        for member in range(MEMBERS):
            episode, headers = await gateway.open(name, group_id=name, group_size=MEMBERS)
            await _talk(gateway, headers, member)
            await gateway.admin.reward(episode, ((step + member + group) % 4) / 4, {"tests": 0.25})
            members.append(episode)
    lease = await gateway.admin.lease("trainer")
    leased = await gateway.admin.leased_groups(lease, wait_s=LONG_S)
    trainer = folder / "trainer"
    write_tokens(trainer / "tokens" / f"step-{step:06d}.parquet", leased.groups, step)
    path = publish(model, trainer / "weights" / f"v{step}", step, step - 1)
    await gateway.admin.publish(step, str(path), wait_s=LONG_S)
    await gateway.admin.ack(lease, f"checkpoint-{step}")
    reported = figures(step)
    with (trainer / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"time": 1e9 + step, "version": step - 1, "step": step, **reported}) + "\n")
    await gateway.admin.post_step(step, reported, step, run=RUN, folder=str(trainer))
    await gateway.admin.post_step(step, {"eval/reward_mean": 0.5 + step / 20}, step, run=RUN)
    return members


def figures(step: int) -> dict[str, float]:
    """Return a trainer's figures of a step."""
    return {
        "reward_mean": 0.3 + 0.05 * step, "loss": 0.5 / step, "kl_recorded_k3": 0.001 * step, "entropy": 2.0 - 0.1 * step,
        "logprob_gap_mean": 1e-5 * step, "importance_weight": 1.0, "clip_fraction": 0.01, "staleness_mean": 0.5,
        "staleness_max": 1.0,
        "excluded_share": 0.02, "truncated_episodes": 0.1, "equal_reward_groups": 0.25, "grad_norm": 0.8, "trained_tokens": 512.0,
        "seconds/total": 4.0, "seconds/step": 1.5, "idle_share": 0.4, "episodes_per_second": 2.0,
    }  # fmt: skip


async def _talk(gateway: RunningGateway, headers: dict[str, str], member: int) -> None:
    """Two turns; every fourth agent then begins a conversation of its own, which is a branch."""
    conversation: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a miller."},
        {"role": "user", "content": WORDS[member % len(WORDS)]},
    ]
    for turn in range(2):
        response = await gateway.chat(headers, messages=conversation, max_tokens=24)
        response.raise_for_status()
        conversation += [
            response.json()["choices"][0]["message"],
            {"role": "user", "content": f"And then? ({turn})"},
        ]
    if member == 3:
        branch = [conversation[0], {"role": "user", "content": "Sum up."}]
        (await gateway.chat(headers, messages=branch, max_tokens=12)).raise_for_status()


def figures_of(position: int) -> dict[str, Any]:
    """Return a trained token's figures, by its position on its path."""
    return {
        "logprob": -0.5 - 0.01 * (position % 50), "entropy": 1.0 + math.sin(position), "advantage": 0.5 - (position % 3) / 2,
        "weight": 1.0 + 0.01 * (position % 5), "mismatch": 0.001 * (position % 7), "clipped": position % 11 == 0,
    }  # fmt: skip


def write_tokens(path: Path, groups: Sequence[Group], step: int) -> None:
    """Write the table that a trainer writes with `[report] tokens_every`."""
    rows = [row for group in groups for episode in group.episodes for row in _rows(group, episode)]
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {"step": step, "batch": step - 1, "version": step}
    table = pa.Table.from_pylist(rows).replace_schema_metadata({"headgate": json.dumps(header)})
    pq.write_table(table, path, compression="zstd")


def _rows(group: Group, episode: Episode) -> list[dict[str, Any]]:
    depths: dict[int, int] = {}
    found = []
    for node in episode.nodes:
        depths[node.index] = depths.get(node.parent, 0) + node.at
        if node.sampled:
            found += _tokens(group, episode, node, depths[node.index])
    return found


def _tokens(group: Group, episode: Episode, node: Node, depth: int) -> list[dict[str, Any]]:
    return [
        {
            "group_id": group.group_id, "episode_id": episode.episode_id, "call_id": node.call_id, "node": node.index,
            "position": depth + i, "token": int(token), "version": int(node.versions[i]),
            "recorded_logprob": float(node.logprobs[i]), "mask_reason": "ratio" if (depth + i) % 13 == 0 else None,
            **figures_of(depth + i),
        }
        for i, token in enumerate(node.ids.tolist())
    ]  # fmt: skip


if __name__ == "__main__":
    made = asyncio.run(record(Path(sys.argv[1])))
    print(f"a run in {made.folder}: gateway console --run {made.folder}")
