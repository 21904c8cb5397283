"""A version is tried on a share of the conversations first. Two fake engines; users press a button under each reply."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headgate.client import GatewayRefused
from tests.harness.gateways import RunningGateway, run_gateway, two_engines
from tests.harness.records import nodes_of
from tests.harness.waiting import until
from tests.harness.weights import fake_weights, probe_of, publish

KEY = "the-key-of-the-helper"
SHARE = 0.3


def settings(model: Path, work: Path, **update: Any) -> dict[str, Any]:
    agent = {"key": KEY, "mode": "train", "group_size": 1, "live": True}
    return two_engines(
        model,
        work,
        agents={"helper": agent},
        staleness={"min_members": 1, "batch": 4},
        update={"canary": SHARE, "canary_conversations": 12, **update},
    )


def version(model: Path, work: Path, number: int) -> str:
    source = fake_weights(work / f"source-{number}", f"version {number}")
    return str(publish(source, work / f"v{number}", number, 0, probe_of(source, model)))


class Users:
    """Users whose thumbs depend on the version that replied."""

    def __init__(self, gateway: RunningGateway, liked: Callable[[int], float]) -> None:
        self.gateway, self.liked = gateway, liked
        self.versions: dict[str, int] = {}
        """The version of each conversation."""

    async def ask(self, messages: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
        response = await self.gateway.http.post(
            "/v1/chat/completions",
            json={"model": "m", "messages": messages, "max_tokens": 4},
            headers={"Authorization": f"Bearer {KEY}"},
        )
        assert response.status_code == 200, response.text
        return response.headers["x-headgate-episode"], response.json()

    async def talk(self, number: int) -> int:
        """Have a conversation to its end; return the version that replied."""
        episode, reply = await self.ask([{"role": "user", "content": f"hello {number}"}])
        found = await sampled_by(self.gateway, episode)
        self.versions[episode] = found
        body = {"id": reply["id"], "reward": self.liked(found)}
        response = await self.gateway.http.post(
            "/v1/feedback", json=body, headers={"Authorization": f"Bearer {KEY}"}
        )
        assert response.status_code == 200, response.text
        await self.gateway.services.coordinator.episodes.finish(episode, 60.0)
        return found

    async def until(self, decided: Callable[[], Awaitable[bool]]) -> None:
        number = 0
        while not await decided():
            await asyncio.gather(*(self.talk(number + i) for i in range(8)))
            number += 8


async def sampled_by(gateway: RunningGateway, episode: str) -> int:
    """Return the one version that sampled all of an episode."""
    nodes = await nodes_of(gateway, episode)
    (found,) = {version for node in nodes if node["sampled"] for version, _ in node["versions"]}
    return int(found)


async def on_trial(gateway: RunningGateway) -> bool:
    return (await gateway.admin.canary())["running"] is not None


async def engines(gateway: RunningGateway) -> list[tuple[str, int]]:
    return sorted((one["state"], one["version"]) for one in (await gateway.admin.status())["engines"])


async def test_a_poisoned_version_is_returned_and_a_kill_in_between_loses_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    values, path = settings(tiny_model, tmp_path), version(tiny_model, tmp_path, 1)
    async with run_gateway(values, in_process=False) as gateway:
        users = Users(gateway, lambda version: 0.0 if version == 1 else 1.0)
        assert {await users.talk(n) for n in range(6)} == {0}
        assert (await gateway.admin.publish(1, path))["state"] == "updating"
        await until(lambda: gateway.model.pool.trial is not None, "a trial")
        record = await gateway.admin.weights(1)
        assert (record["state"], record["on_trial"]) == ("updating", True)
        assert record["why"].startswith("on trial: 0 of at most 12")
        await asyncio.gather(*(users.talk(n) for n in range(12)))
        assert set(users.versions.values()) == {0, 1}
        talk = [{"role": "user", "content": "one that goes on"}]
        episode, reply = await users.ask(talk)
        before = await gateway.admin.canary()
    async with run_gateway(values, in_process=False) as gateway:
        users.gateway = gateway
        await until(lambda: gateway.model.pool.trial is not None, "a trial")
        trial = gateway.model.pool.trial
        assert {name for name, v in users.versions.items() if v and trial.since} == {
            name
            for name in users.versions
            if trial.tries("helper", (await gateway.admin.episode(name))["created_at"], name)
        }
        talk += [reply["choices"][0]["message"], {"role": "user", "content": "go on"}]
        assert (await users.ask(talk))[0] == episode
        await sampled_by(gateway, episode)

        async def same() -> bool:
            now = await gateway.admin.canary()
            return (
                now["running"]["figures"]["live"]["conversations"]
                >= (before["running"]["figures"]["live"]["conversations"])
            )

        assert await same()

        async def decided() -> bool:
            return not await on_trial(gateway)

        await users.until(decided)
        record = await gateway.admin.weights(1)
        assert (record["state"], record["bad"]) == ("failed", True)
        assert "its rewards are lower: 0 (" in record["why"]
        (ended,) = (await gateway.admin.canary())["ended"]
        assert ended["figures"]["candidate"]["reward_high"] < ended["figures"]["live"]["reward_low"]
        await until(
            lambda: {slot.version for slot in gateway.model.pool.slots.values()} == {0},
            "version 0 in all engines",
        )
        assert await users.talk(999) == 0
        assert 1 in gateway.model.versions.untrained(orphans_too=False)
        assert await gateway.admin.publish(1, path) == record, "it is not tried again"


async def test_a_version_that_is_as_good_is_promoted(tiny_model: Path, tmp_path: Path) -> None:
    values = settings(tiny_model, tmp_path)
    async with run_gateway(values, in_process=False) as gateway:
        users = Users(gateway, lambda version: 1.0)
        await gateway.admin.publish(1, version(tiny_model, tmp_path, 1))
        await until(lambda: gateway.model.pool.trial is not None, "a trial")
        assert gateway.model.ledger.rule.version == 0

        async def decided() -> bool:
            return not await on_trial(gateway)

        await users.until(decided)
        assert (await gateway.admin.weights(1))["state"] == "live"
        assert gateway.model.ledger.rule.version == 1
        assert await users.talk(999) in (0, 1)


@pytest.mark.parametrize(("action", "state"), [("promote", "live"), ("rollback", "failed")])
async def test_a_person_decides_about_a_trial_that_is_held(
    tiny_model: Path, tmp_path: Path, action: Any, state: str
) -> None:
    async with run_gateway(settings(tiny_model, tmp_path), in_process=False) as gateway:
        with pytest.raises(GatewayRefused, match="no version of 'demo' is on trial"):
            await gateway.admin.decide_canary(action)
        await gateway.admin.publish(1, version(tiny_model, tmp_path, 1))
        await until(lambda: gateway.model.pool.trial is not None, "a trial")
        held = await gateway.admin.decide_canary("hold")
        assert held["running"]["why"].startswith("held by a person")
        users = Users(gateway, lambda version: 1.0)
        await asyncio.gather(*(users.talk(n) for n in range(60)))
        assert sum(users.versions.values()) > 12
        assert await on_trial(gateway)
        (ended,) = (await gateway.admin.decide_canary(action))["ended"]
        assert "a person has decided so" in ended["why"]
        assert (await gateway.admin.weights(1))["state"] == state
