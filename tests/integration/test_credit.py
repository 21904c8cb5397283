"""Rewards of calls on their whole way: posted, stored, fed by a restarted gateway, and turned into advantages."""

from __future__ import annotations

from pathlib import Path

from tests.harness.gateways import run_gateway, settings_for
from trainer.algorithms import create
from trainer.algorithms.grpo import GrpoSettings
from trainer.config.batch import CreditSettings
from trainer.data import credit

POSTED = {"a": [1.0, 2.0], "b": [0.0, 5.0]}
"""On the two calls of each episode, which gets 10 (a) or 0 (b) in addition."""
CUT = CreditSettings(level="call", discount=0.5, truncated="penalize", penalty=4.0)
BY_HAND = {"a": [2.25, 3.5], "b": [-2.25, -3.5]}
"""All four calls are cut. Last calls: 2 + 10 - 4 = 8 and 5 - 4 = 1; first: 1 - 4 + 8 / 2 = 1 and 0 - 4 + 1 / 2 = -3.5; each
minus the mean of its turn."""


async def test_posted_rewards_become_advantages_of_calls_after_a_restart(
    tiny_model: Path, tmp_path: Path
) -> None:
    staleness = {"batch": 1, "eta": 0}
    values = settings_for(tiny_model, tmp_path, staleness=staleness, feed={"lease_s": 3600})
    calls: dict[str, list[str]] = {}
    async with run_gateway(values) as gateway:
        gateway.engine.set_faults({"endless": True})
        for name, posted in POSTED.items():
            episode, headers = await gateway.open("task", group_id="g", group_size=2)
            for number, reward in enumerate(posted):
                messages = [{"role": "user", "content": f"call {number}"}]
                reply = (await gateway.chat(headers, messages=messages, max_tokens=3)).json()
                calls.setdefault(name, []).append(reply["id"])
                await gateway.admin.call_reward(episode, reply["id"], reward)
            await gateway.admin.reward(episode, 10.0 if name == "a" else 0.0)
    async with run_gateway(values) as gateway:
        lease = await gateway.admin.lease("trainer")
        (group,) = (await gateway.admin.leased_groups(lease, wait_s=60)).groups
    (found,) = credit.advantages([group], create(GrpoSettings(normalize_std=False)), CUT)
    ours = {
        node.call_id: credits[node.index]
        for episode, credits in zip(group.episodes, found, strict=True)
        for node in episode.nodes
        if node.sampled
    }
    assert {name: [ours[call] for call in made] for name, made in calls.items()} == BY_HAND
