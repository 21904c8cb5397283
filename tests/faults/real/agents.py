"""Fifty agents with the openai package, in one process: `python -m tests.faults.real.agents PLAN.json`.

Each opens episodes, sends questions for some turns, streamed and whole, leaves now and then, sends again what broke, tries to
read what belongs to others, and posts rewards. Each has a transcript (`tests.faults.callers`). SIGTERM: every agent ends its
present episodes and stops.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx
import openai

from tests.faults.callers import FAILURES, Call, Caller, question
from tests.faults.evidence import Journal

_TRIES = 5
_TIMEOUT_S = 60.0
Known = list[tuple[str, str]]
"""(episode, a stored response of it), of all agents: what others may not read."""


class Agent:
    """One agent and its transcript."""

    def __init__(self, number: int, plan: dict[str, Any], known: Known, over: asyncio.Event) -> None:
        self._number = number
        self._plan = plan
        self._known = known
        self._over = over
        self._random = Random(f"{plan['seed']} agent {number}")
        self._questions = 0
        self._journal = Journal(Path(plan["evidence"]) / "agents" / f"agent-{number}.jsonl")
        self._caller = Caller(self._journal, plan["delay_s"])
        self._admin = httpx.AsyncClient(
            base_url=plan["url"], headers={"Authorization": f"Bearer {plan['admin_key']}"}, timeout=_TIMEOUT_S
        )

    async def live(self) -> None:
        """Play groups, one after another, until `over` is set."""
        count = 0
        while not self._over.is_set():
            count += 1
            # Some never train: they continue while the others wait for a place within the staleness bound.
            train = self._number % 3 != 0 and self._random.random() < self._plan["train_share"]
            group, size = f"group-{self._number}-{count}", self._plan["group_size"] if train else 1
            self._journal.write("group", group=group, size=size, mode="train" if train else "eval")
            async with asyncio.TaskGroup() as members:
                for _ in range(size):
                    members.create_task(self._episode(group, size, train))
            await asyncio.sleep(self._random.uniform(0, 2 * self._plan["pause_s"]))
        self._journal.flush()

    async def _episode(self, group: str, size: int, train: bool) -> None:
        opened = await self._open(group, size, "train" if train else "eval")
        if opened is None:
            return
        episode, good = opened["episode_id"], True
        messages: list[dict[str, str]] = []
        client = openai.AsyncOpenAI(
            base_url=opened["base_url"], api_key=opened["api_key"], max_retries=3, timeout=_TIMEOUT_S
        )
        async with client:
            for _ in range(self._random.randrange(1, self._plan["turns"] + 1)):
                text = await self._question(client, episode, messages)
                if text is None:
                    good = False
                    break
                messages.append({"role": "assistant", "content": text})
                if self._random.random() < self._plan["leak_share"]:
                    await self._try_others(opened)
        await self._end(episode, group, good)
        self._journal.flush()

    # Its episodes

    async def _open(self, group: str, size: int, mode: str) -> dict[str, Any] | None:
        body = {"task_id": f"task-{self._number}", "group_id": group, "group_size": size, "mode": mode}
        while not self._over.is_set():
            try:
                response = await self._admin.post("/admin/v1/episodes", json=body, params={"wait": 10})
            except httpx.HTTPError as error:
                self._journal.write("open_failed", group=group, error=repr(error))
                await asyncio.sleep(self._random.uniform(0.2, 1.0))
                continue
            if response.is_success:
                opened: dict[str, Any] = response.json()
                self._journal.write("opened", group=group, episode=opened["episode_id"], mode=mode)
                return opened
            self._journal.write(
                "open_failed", group=group, status=response.status_code, error=response.text[:300]
            )
            if response.status_code == 409:
                return None  # a lost response has used the place
            await asyncio.sleep(self._random.uniform(0.2, 1.0))
        return None

    async def _end(self, episode: str, group: str, good: bool) -> None:
        """Post the reward until the gateway has reported how the episode ended."""
        path = f"/admin/v1/episodes/{episode}/reward"
        body: dict[str, Any] = {"reward": self._random.random()}
        if not good:
            path, body = f"/admin/v1/episodes/{episode}/abandon", {"reason": "agent_gave_up"}
        for _ in range(100):
            try:
                response = await self._admin.post(path, json=body)
                if response.status_code in (404, 409):  # was it our own, whose response was lost?
                    shown = await self._admin.get(f"/admin/v1/episodes/{episode}")
                    if shown.status_code >= 500:
                        raise httpx.ReadError(shown.text[:300])
                    row = shown.json()
                    kept = row.get("reason") == "rewarded" and row.get("reward") == body.get("reward")
                    end = {"state": row.get("state"), "reason": row.get("reason")}
                    self._journal.write("ended", episode=episode, group=group, rewarded=kept, **end)
                    return
                if response.is_success:
                    reward = body.get("reward")
                    self._journal.write("ended", episode=episode, group=group, rewarded=good, reward=reward)
                    return
                error = f"{response.status_code} {response.text[:200]}"
            except (httpx.HTTPError, ValueError) as failure:
                error = repr(failure)
            self._journal.write("end_failed", episode=episode, error=error)
            await asyncio.sleep(self._random.uniform(0.3, 1.5))
        self._journal.write("unended", episode=episode, group=group)

    # Its questions

    async def _question(self, client: openai.AsyncOpenAI, episode: str, messages: list[Any]) -> str | None:
        """Send a question until its reply is whole; return None to give the episode up."""
        draw, plan = self._random, self._plan
        streamed, keyed = draw.random() < 0.6, draw.random() < 0.5
        tokens, stored = draw.randrange(4, plan["tokens"]), draw.random() < plan["store_share"]
        leave = draw.randrange(1, tokens) if draw.random() < plan["leave_share"] else 0
        ask = self._name()
        messages.append(question(ask))
        for attempt in range(_TRIES):
            if attempt and not keyed:
                ask = self._name()
                messages[-1] = question(ask)
            key = ask if keyed else ""
            call = Call(ask, episode, messages, tokens, streamed, attempt, key, stored, leave)
            try:
                response = await self._caller.send(client, call)
            except FAILURES as error:
                if isinstance(error, openai.APIStatusError) and error.status_code in (404, 409, 422):
                    return None  # the episode has ended
                await asyncio.sleep(draw.uniform(0.1, 1.0))
                continue
            leave = 0
            if response is not None:
                if stored:
                    self._known.append((episode, response.id))
                return response.text
        return None

    def _name(self) -> str:
        self._questions += 1
        return f"{self._number}-{self._questions}"

    # What is not its own

    async def _try_others(self, opened: dict[str, Any]) -> None:
        """Request with its own key what belongs to others."""
        own = opened["episode_id"]
        others = [known for known in self._known[-200:] if known[0] != own]
        if not others:
            return
        foreign, response = self._random.choice(others)
        root, key = self._plan["url"], {"Authorization": f"Bearer {opened['api_key']}"}
        body = {"model": "any", "max_tokens": 1, "messages": [question("foreign")]}
        trials: list[tuple[str, str, str, dict[str, Any]]] = [
            ("stored response", "GET", f"/v1/responses/{response}", {}),
            ("path", "POST", f"/e/{foreign}/v1/chat/completions", {"json": body}),
            (
                "header",
                "POST",
                "/v1/chat/completions",
                {"json": body, "headers": {"X-Headgate-Episode": foreign}},
            ),
            ("trajectory", "GET", f"/admin/v1/episodes/{foreign}/trajectory", {}),
            ("no key", "GET", f"/admin/v1/episodes/{foreign}", {"headers": {"Authorization": ""}}),
        ]
        what, method, path, more = self._random.choice(trials)
        headers = {**key, **more.pop("headers", {})}
        try:
            async with httpx.AsyncClient(base_url=root, timeout=_TIMEOUT_S) as http:
                got = await http.request(method, path, headers=headers, **more)
        except httpx.HTTPError as error:
            self._journal.write("try", what=what, own=own, foreign=foreign, status=0, error=repr(error))
            return
        self._journal.write(
            "try", what=what, own=own, foreign=foreign, status=got.status_code, body=got.text[:300]
        )


async def _main(plan: dict[str, Any]) -> None:
    over, known = asyncio.Event(), Known()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, over.set)
    async with asyncio.TaskGroup() as agents:
        for number in range(plan["agents"]):
            agents.create_task(Agent(number, plan, known, over).live(), name=f"agent-{number}")


if __name__ == "__main__":
    logging.getLogger("httpx").setLevel(logging.ERROR)
    with suppress(KeyboardInterrupt):
        asyncio.run(_main(json.loads(Path(sys.argv[1]).read_text())))
    os._exit(0)  # idle connections need not be closed one by one
