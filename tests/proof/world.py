"""A gateway with two engines, agents that talk to it by the `openai` package, and updates while they do.

Owns the gateway (in this process, so that a mutant can be put into it), the engines that it starts and the agents. What happens
is drawn from the seed: lengths, pauses, which engine is killed and when. That updates are crossed is left to no chance: an engine
is held for one only in the middle of requests (`tests.harness.crossing`). Nothing is judged here: the outcome is what clients
received, what was recorded, and what the gateway said of each update.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import openai

from gateway.rollout.slot import Slot
from gateway.types import EpisodeOpened
from tests.harness.crossing import HOLD_S, crossed, freeze
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.transports import Way, served
from tests.harness.vllm import vllm_settings
from tests.proof.models import Family

ORDERS = ("rolling", "pull")
_WAIT_S = {"fake": 600.0, "vllm": 600.0}
"""The longest that anything may take: an engine is restarted meanwhile, on a machine that may be busy."""
_AFTER_FAILURE_S = 0.2


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a trial."""

    engine: str = "fake"
    mode: str = "abort"
    order: str = "rolling"
    transport: str = "filesystem"
    """How versions come to the engines (`tests.harness.transports`)."""
    seed: int = 0
    updates: int = 8
    streams: int = 16
    agents: int = 8
    kill: bool = True
    """One engine dies, at some moment of the update in the middle."""
    tokens: int = 100
    """Tokens of a long stream, at most; then it asks again."""
    crossed: int = 3
    """Requests that are in their middle in an engine when it is held for an update."""
    delay_s: float = 0.02
    """The fake engine's time for a token."""
    lag_s: float = 0.05
    """Seconds that the fake engine holds sampled tokens back, so that they arrive when their version may be gone."""

    @property
    def name(self) -> str:
        """The plan's name for people."""
        return f"{self.engine}, {self.mode}, {self.order}, {self.transport}"


@dataclass(slots=True)
class Outcome:
    """The outcome as plain JSON."""

    received: list[dict[str, Any]] = field(default_factory=list)
    trajectories: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    """The versions' records."""
    restarts: int = 0


async def play(plan: Plan, family: Family, work: Path, say: Callable[[str], None]) -> Outcome:
    """Lets it happen. Raises TimeoutError (in a group), with what was waited for, if it does not go on."""
    update = {"mode": plan.mode, "order": plan.order, "pause_timeout_s": HOLD_S}
    async with served(plan.transport, work / "models" / "versions", work) as way:
        engine = _engines(plan, work) | way.engine
        values = settings_for(family.paths[0], work, engine=engine, update=update, weights=way.weights)
        values["models"]["demo"]["max_model_len"] = 4096
        async with run_gateway(values, in_process=False) as gateway:
            world = _World(plan, family, gateway, say, way)
            with crossed(world.stop_in_the_middle):
                outcome = await world.run()
            outcome.trajectories = [await gateway.admin.trajectory(episode) for episode in world.episodes]
            outcome.restarts = sum(e["restarts"] for e in (await gateway.admin.status())["engines"])
    return outcome


def _engines(plan: Plan, work: Path) -> dict[str, Any]:
    """Returns the `[engine]` table."""
    if plan.engine == "fake":
        return {"count": 2, "args": ["--delay-s", str(plan.delay_s)]}
    patience = {"start_s": _WAIT_S["vllm"]}
    return vllm_settings(work / "engine.log") | {"count": 2, **patience}


class _World:
    """One gateway's agents and updates."""

    def __init__(
        self, plan: Plan, family: Family, gateway: RunningGateway, say: Callable[[str], None], way: Way
    ) -> None:
        self.episodes: list[str] = []
        self._plan = plan
        self._family = family
        self._gateway = gateway
        self._way = way
        self._say = say
        self._random = Random(f"{plan.seed} updates")
        self._wait_s = _WAIT_S[plan.engine]
        self._over = asyncio.Event()
        self._asking = asyncio.Event()
        """Cleared: no new calls, those that are open go on."""
        self._asking.set()
        self._progress = [0] * plan.streams
        """Chunks that each long stream has received."""
        self._outcome = Outcome()

    async def stop_in_the_middle(self, slot: Slot) -> None:
        """An update waits for streams that cross it."""
        self._asking.set()
        await freeze(slot, self._plan.crossed)

    async def run(self) -> Outcome:
        """Agents all the time, updates one after another; the agents end with their present calls."""
        await self._all_engines_open()
        await self._bend_engines()
        async with asyncio.TaskGroup() as agents:
            for number in range(self._plan.streams):
                agents.create_task(self._long_stream(number), name=f"stream-{number}")
            for number in range(self._plan.agents):
                agents.create_task(self._short_calls(number), name=f"agent-{number}")
            for version in range(1, self._plan.updates + 1):
                if not await self._update(version):
                    break
            await self._all_engines_open()
            await self._moved_on()
            self._over.set()
        return self._outcome

    # Agents

    async def _long_stream(self, number: int) -> None:
        random = Random(f"{self._plan.seed} stream {number}")
        opened = await self._open(f"stream-{number}")
        async with self._sdk(opened) as client:
            while not self._over.is_set():
                messages = [{"role": "user", "content": "count! " * random.randrange(1, 20)}]
                tokens = random.randrange(3 * self._plan.tokens // 4, self._plan.tokens)

                def seen() -> None:
                    self._progress[number] += 1

                await self._ask(client, opened.episode_id, messages, tokens, True, seen)

    async def _short_calls(self, number: int) -> None:
        """Conversations of a few turns, whole and streamed."""
        random = Random(f"{self._plan.seed} agent {number}")
        while not self._over.is_set():
            opened = await self._open(f"agent-{number}")
            messages: list[Any] = []
            async with self._sdk(opened) as client:
                for _ in range(random.randrange(1, 5)):
                    messages.append({"role": "user", "content": "next! " * random.randrange(1, 5)})
                    tokens, streamed = random.randrange(1, 24), random.random() < 0.5
                    text = await self._ask(client, opened.episode_id, messages, tokens, streamed)
                    messages.append({"role": "assistant", "content": text})

    def _sdk(self, opened: EpisodeOpened) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=opened.base_url, api_key=opened.api_key, max_retries=0, timeout=self._wait_s
        )

    async def _open(self, task: str) -> EpisodeOpened:
        opened = await self._gateway.admin.open_episode(task, mode="eval")
        self.episodes.append(opened.episode_id)
        return opened

    async def _ask(
        self,
        client: openai.AsyncOpenAI,
        episode: str,
        messages: list[Any],
        tokens: int,
        streamed: bool,
        seen: Callable[[], None] = lambda: None,
    ) -> str:
        """One call; what the client received of it is kept, whatever becomes of it."""
        await self._asking.wait()
        call: dict[str, Any] = {"episode": episode, "call": "", "text": "", "finish": None}
        call |= {"asked": tokens, "error": ""}
        self._outcome.received.append(call)
        body: Any = {"model": "any", "messages": messages, "max_tokens": tokens}
        try:
            if not streamed:
                answer = await client.chat.completions.create(**body)
                text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
                call |= {"call": answer.id, "text": text or "", "finish": finish}
                return text or ""
            async for chunk in await client.chat.completions.create(**body, stream=True):
                seen()
                for part in chunk.choices:
                    call["call"], call["finish"] = chunk.id, part.finish_reason
                    call["text"] += part.delta.content or ""
        except (openai.OpenAIError, httpx.HTTPError) as error:
            call["error"] = f"{type(error).__name__}: {error}"
            self._say(f"failed: {call['error']}")
            await asyncio.sleep(_AFTER_FAILURE_S)
        return str(call["text"])

    # Updates

    async def _update(self, version: int) -> bool:
        """Returns whether the version went live; if not, the next would be refused for its parent."""
        plan, random = self._plan, self._random
        await self._all_engines_open()
        await self._bend_engines()
        await self._moved_on()
        await asyncio.sleep(random.uniform(0, 0.2))
        self._say(f"version {version} of {plan.updates}")
        place = self._way.place(self._family.paths[version])
        publish = self._gateway.admin.publish(version, wait_s=self._wait_s, **place)
        if plan.kill and version == plan.updates // 2 + 1:
            _, record = await asyncio.gather(self._kill(random), publish)
        else:
            record = await publish
        self._outcome.updates.append(record)
        return bool(record["state"] == "live")

    async def _kill(self, random: Random) -> None:
        """Some engine, some time before or in the update."""
        engines = (await self._gateway.admin.status())["engines"]
        victim = random.choice(sorted(engines, key=lambda engine: engine["name"]))
        await asyncio.sleep(random.uniform(0, 0.2))
        self._say(f"{victim['name']} is killed")
        os.kill(victim["pid"], signal.SIGKILL)
        if self._plan.engine == "vllm":
            self._asking.clear()  # a real engine takes the whole of a small machine to start

    async def _bend_engines(self) -> None:
        """Sets the fault, for requests that begin from now on. A restarted engine has to be told again."""
        if self._plan.engine != "fake" or not self._plan.lag_s:
            return

        async def bent() -> bool:
            for engine in (await self._gateway.admin.status())["engines"]:
                if engine["url"] is None:  # it is being restarted
                    return False
                url = f"{engine['url']}/fake/faults"
                try:
                    answer = await self._gateway.http.post(url, json={"lag_s": self._plan.lag_s})
                except httpx.TransportError:
                    return False
                answer.raise_for_status()
            return True

        await self._until(bent, "every engine has its fault")

    async def _all_engines_open(self) -> None:
        async def are() -> bool:
            engines = (await self._gateway.admin.status())["engines"]
            return {engine["state"] for engine in engines} == {"open"}

        await self._until(are, "every engine is open")
        self._asking.set()

    async def _moved_on(self) -> None:
        """Every long stream receives something: none of them hangs, and the next update crosses them all."""
        before = list(self._progress)

        async def have() -> bool:
            return all(now > then for now, then in zip(self._progress, before, strict=True))

        await self._until(have, "every long stream goes on")

    async def _until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                while not await condition():
                    await asyncio.sleep(0.05)
        except TimeoutError as error:
            raise TimeoutError(f"not within {self._wait_s:g} s: {what}") from error
