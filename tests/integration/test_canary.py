"""A version is tried on a share of the conversations first. Two fake engines; users press a button under each reply."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate.client import GatewayClient
from tests.harness.gateway_command import gateway_command, served
from tests.harness.gateways import run_gateway, two_engines
from tests.harness.waiting import LONG_S, until
from tests.harness.weights import fake_weights, probe_of, publish

KEY, TALKER = "the-key-of-the-helper", "the-key-of-the-talker"
SHARE = 0.3


def settings(model: Path, work: Path, **update: Any) -> dict[str, Any]:
    agent = {"mode": "train", "group_size": 1, "live": True}
    return two_engines(
        model,
        work,
        agents={"helper": {"key": KEY, **agent}, "talker": {"key": TALKER, **agent}},
        staleness={"min_members": 1, "batch": 4},
        update={"canary": SHARE, "canary_conversations": 12, **update},
    )


def version(model: Path, work: Path, number: int) -> str:
    source = fake_weights(work / f"source-{number}", f"version {number}")
    return str(publish(source, work / f"v{number}", number, 0, probe_of(source, model)))


class Users:
    """Users whose thumbs depend on the version that replied."""

    def __init__(self, admin: GatewayClient, http: httpx.AsyncClient, liked: Callable[[int], float]) -> None:
        self.admin, self.http, self.liked = admin, http, liked
        self.versions: dict[str, int] = {}
        """The version of each conversation."""

    async def ask(self, messages: list[dict[str, Any]], key: str = KEY) -> tuple[str, dict[str, Any]]:
        body = {"model": "m", "messages": messages, "max_tokens": 4}
        response = await self._post("/v1/chat/completions", body, key)
        return response.headers["x-headgate-episode"], response.json()

    async def talk(self, number: int) -> int:
        """Have a conversation; return the version that replied."""
        episode, reply = await self.ask([{"role": "user", "content": f"hello {number}"}])
        found = self.versions[episode] = await sampled_by(self.admin, episode)
        await self._post("/v1/feedback", {"id": reply["id"], "reward": self.liked(found)}, KEY)
        await self.admin.close_episode(episode, LONG_S)
        return found

    async def _post(self, path: str, body: dict[str, Any], key: str) -> httpx.Response:
        response = await self.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
        assert response.status_code == 200, response.text
        return response

    async def until_decided(self) -> None:
        number = 1000
        while await on_trial(self.admin):
            await asyncio.gather(*(self.talk(number + i) for i in range(8)))
            number += 8


async def sampled_by(admin: GatewayClient, episode: str) -> int:
    """Return the one version that sampled all of an episode."""
    nodes = (await admin.trajectory(episode))["nodes"]
    (found,) = {version for node in nodes if node["sampled"] for version, _ in node["versions"]}
    return int(found)


async def on_trial(admin: GatewayClient) -> bool:
    return (await admin.canary())["running"] is not None


async def test_a_poisoned_version_is_returned_and_a_kill_9_in_between_loses_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    values, path = settings(tiny_model, tmp_path), version(tiny_model, tmp_path, 1)
    url = f"http://127.0.0.1:{values['server']['port']}"
    async with (
        GatewayClient(url, None, LONG_S) as admin,
        httpx.AsyncClient(base_url=url, timeout=LONG_S) as http,
    ):
        users = Users(admin, http, lambda version: 0.0 if version == 1 else 1.0)
        async with served(values, tmp_path) as gateway:
            await gateway.ready()
            assert {await users.talk(n) for n in range(4)} == {0}
            assert (await admin.publish(1, path))["state"] == "updating"
            await until(lambda: on_trial(admin), "a trial")
            record = await admin.weights(1)
            assert (record["state"], record["on_trial"]) == ("updating", True)
            assert record["why"].startswith("on trial: 0 of at most 12")
            await asyncio.gather(*(users.talk(n) for n in range(12)))
            assert set(users.versions.values()) == {0, 1}
            talk = [{"role": "user", "content": "one that goes on"}]
            episode, reply = await users.ask(talk, TALKER)
            gateway.signal(signal.SIGKILL)
            await gateway.process.wait()
        async with served(values, tmp_path) as gateway:
            await gateway.ready()
            assert await on_trial(admin), "without its trainer"
            talk += [reply["choices"][0]["message"], {"role": "user", "content": "go on"}]
            assert (await users.ask(talk, TALKER))[0] == episode
            await sampled_by(admin, episode)
            await users.until_decided()
            record = await admin.weights(1)
            assert (record["state"], record["bad"]) == ("failed", True)
            assert "its rewards are lower: 0 (" in record["why"]
            (ended,) = (await admin.canary())["ended"]
            assert ended["outcome"] == "returned"
            candidate, live = ended["figures"]["candidate"], ended["figures"]["live"]
            assert candidate["reward_high"] < live["reward_low"]
            counted = candidate["conversations"] + live["conversations"]
            assert len(users.versions) - 4 >= counted > 12, "those before the kill are counted too"

            async def back() -> bool:
                return {one["version"] for one in (await admin.status())["engines"]} == {0}

            await until(back, "version 0 in all engines")
            assert await users.talk(999) == 0
            assert await admin.publish(1, path) == record, "it is not tried again"


async def test_a_version_that_is_as_good_is_promoted(tiny_model: Path, tmp_path: Path) -> None:
    async with run_gateway(settings(tiny_model, tmp_path), in_process=False) as gateway:
        users = Users(gateway.admin, gateway.http, lambda version: 1.0)
        await gateway.admin.publish(1, version(tiny_model, tmp_path, 1))
        await until(lambda: on_trial(gateway.admin), "a trial")
        assert gateway.model.ledger.rule.version == 0
        await users.until_decided()
        assert (await gateway.admin.weights(1))["state"] == "live"
        assert gateway.model.ledger.rule.version == 1
        assert await users.talk(999) in (0, 1)


@pytest.mark.parametrize(("action", "state"), [("promote", "live"), ("rollback", "failed")])
async def test_a_person_decides_about_a_trial_that_is_held(
    tiny_model: Path, tmp_path: Path, action: str, state: str
) -> None:
    async with run_gateway(settings(tiny_model, tmp_path), in_process=False) as gateway:
        where = ("--gateway", gateway.url, "--json")
        assert "no version of 'demo' is on trial" in (await gateway_command("canary", action, *where)).output
        await gateway.admin.publish(1, version(tiny_model, tmp_path, 1))
        await until(lambda: on_trial(gateway.admin), "a trial")
        held = json.loads((await gateway_command("canary", "hold", *where)).stdout)
        assert held["running"]["why"].startswith("held by a person")
        users = Users(gateway.admin, gateway.http, lambda version: 1.0)
        while sum(users.versions.values()) <= 12:
            await asyncio.gather(*(users.talk(len(users.versions) + n) for n in range(8)))

        async def counted() -> bool:
            return bool((await gateway.admin.canary())["running"]["figures"]["candidate"]["rewarded"] > 12)

        await until(counted, "all conversations have ended")
        (ended,) = json.loads((await gateway_command("canary", action, *where)).stdout)["ended"]
        assert "a person has decided so" in ended["why"]
        assert (await gateway.admin.weights(1))["state"] == state
        assert (1 in gateway.model.versions.untrained(orphans_too=False)) == (state == "failed")
