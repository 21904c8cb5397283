"""Fifty agents with the openai package, in one process: `python -m tests.chaos.agents PLAN.json`.

Each opens episodes, talks in them for some turns, streamed and whole, breaks off now and then, asks again what broke, tries what
is not its own, and posts rewards. Whatever it sends, receives and is told goes to a transcript of its own; nothing is judged
here. SIGTERM: every agent ends with the episodes that it has.

Every question names itself, `[ask:...]`, so the prompts that engines and the database have can be laid beside the transcript. A
question that is asked again by the package itself, or with the same idempotency key, keeps its name; any other is a new one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import openai

from tests.chaos.journal import Journal

_TRIES = 5
_TIMEOUT_S = 60.0
_FAILURES = (openai.OpenAIError, httpx.HTTPError, OSError)


@dataclass(slots=True)
class Known:
    """Names that agents know of one another, to try what is not theirs."""

    episodes: list[tuple[str, str]] = field(default_factory=list)
    """(episode, an answer that it stored)"""


class Agent:
    """One agent and its transcript."""

    def __init__(self, number: int, plan: dict[str, Any], known: Known, over: asyncio.Event) -> None:
        self._number = number
        self._plan = plan
        self._known = known
        self._over = over
        self._random = Random(f"{plan['seed']} agent {number}")
        self._asked = 0
        self._journal = Journal(Path(plan["evidence"]) / "agents" / f"agent-{number}.jsonl")
        self._admin = httpx.AsyncClient(
            base_url=plan["url"], headers={"Authorization": f"Bearer {plan['admin_key']}"}, timeout=_TIMEOUT_S
        )

    async def live(self) -> None:
        """Groups, one after another, until it is over."""
        count = 0
        while not self._over.is_set():
            count += 1
            # Some never train: they go on while the others wait for a slot within the staleness bound.
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
                answer = await self._admin.post("/admin/v1/episodes", json=body, params={"wait": 10})
            except httpx.HTTPError as error:
                self._journal.write("open_failed", group=group, error=repr(error))
                await asyncio.sleep(self._random.uniform(0.2, 1.0))
                continue
            if answer.is_success:
                opened: dict[str, Any] = answer.json()
                self._journal.write("opened", group=group, episode=opened["episode_id"], mode=mode)
                return opened
            self._journal.write(
                "open_failed", group=group, status=answer.status_code, error=answer.text[:300]
            )
            if answer.status_code == 409:
                return None  # an answer that was lost has taken the place
            await asyncio.sleep(self._random.uniform(0.2, 1.0))
        return None

    async def _end(self, episode: str, group: str, good: bool) -> None:
        """Posts the reward until the gateway has said what became of it."""
        path = f"/admin/v1/episodes/{episode}/reward"
        body: dict[str, Any] = {"reward": self._random.random()}
        if not good:
            path, body = f"/admin/v1/episodes/{episode}/abandon", {"reason": "agent_gave_up"}
        for _ in range(100):
            try:
                answer = await self._admin.post(path, json=body)
                if answer.status_code in (404, 409):  # was it our own, whose answer was lost?
                    shown = await self._admin.get(f"/admin/v1/episodes/{episode}")
                    if shown.status_code >= 500:
                        raise httpx.ReadError(shown.text[:300])
                    row = shown.json()
                    kept = row.get("reason") == "rewarded" and row.get("reward") == body.get("reward")
                    said = {"state": row.get("state"), "reason": row.get("reason")}
                    self._journal.write("ended", episode=episode, group=group, rewarded=kept, **said)
                    return
                if answer.is_success:
                    reward = body.get("reward")
                    self._journal.write("ended", episode=episode, group=group, rewarded=good, reward=reward)
                    return
                error = f"{answer.status_code} {answer.text[:200]}"
            except (httpx.HTTPError, ValueError) as failure:
                error = repr(failure)
            self._journal.write("end_failed", episode=episode, error=error)
            await asyncio.sleep(self._random.uniform(0.3, 1.5))
        self._journal.write("unended", episode=episode, group=group)

    # Its questions

    async def _question(self, client: openai.AsyncOpenAI, episode: str, messages: list[Any]) -> str | None:
        """Asks until it has the whole reply; None: it gives the episode up."""
        streamed, keyed = self._random.random() < 0.6, self._random.random() < 0.5
        tokens, store = (
            self._random.randrange(4, self._plan["tokens"]),
            self._random.random() < self._plan["store_share"],
        )
        leave = self._random.randrange(1, tokens) if self._random.random() < self._plan["leave_share"] else 0
        ask = self._name()
        messages.append(_said(ask))
        for attempt in range(_TRIES):
            if attempt and not keyed:
                ask = self._name()
                messages[-1] = _said(ask)
            call = {"ask": ask, "attempt": attempt, "episode": episode, "key": ask if keyed else ""}
            self._journal.write("ask", **call, stream=streamed, tokens=tokens)
            body: dict[str, Any] = {
                "model": "any",
                "messages": messages,
                "max_tokens": tokens,
                "store": store,
            }
            if keyed:
                body["extra_headers"] = {"Idempotency-Key": ask}
            try:
                text = await (
                    self._stream(client, call, body, leave)
                    if streamed
                    else self._whole(client, call, body, leave)
                )
            except _FAILURES as error:
                self._end_of(call, "broken", error=f"{type(error).__name__}: {str(error)[:300]}")
                if isinstance(error, openai.APIStatusError) and error.status_code in (404, 409, 422):
                    return None  # the episode is over
                await asyncio.sleep(self._random.uniform(0.1, 1.0))
                continue
            leave = 0
            if text is not None:
                return text
        return None

    async def _whole(
        self, client: openai.AsyncOpenAI, call: dict[str, Any], body: dict[str, Any], leave: int
    ) -> str | None:
        asking = client.chat.completions.create(**body)
        if leave:
            try:
                async with asyncio.timeout(leave * self._plan["delay_s"]):
                    answer = await asking
            except TimeoutError:
                self._end_of(call, "hung_up")
                return None
        else:
            answer = await asking
        choice = answer.choices[0]
        text = choice.message.content or ""
        self._end_of(call, "finished", id=answer.id, text=text, finish=choice.finish_reason)
        if body["store"]:
            self._known.episodes.append((call["episode"], answer.id))
        return text

    async def _stream(
        self, client: openai.AsyncOpenAI, call: dict[str, Any], body: dict[str, Any], leave: int
    ) -> str | None:
        text, finish, name, chunks = "", None, "", 0
        async with await client.chat.completions.create(**body, stream=True) as stream:
            async for chunk in stream:
                chunks += 1
                name = chunk.id
                for choice in chunk.choices:
                    piece = choice.delta.content or ""
                    if piece:
                        text += piece
                        self._journal.write(
                            "chunk", ask=call["ask"], attempt=call["attempt"], id=name, text=piece
                        )
                    finish = choice.finish_reason or finish
                if leave and chunks >= leave and finish is None:
                    self._end_of(call, "hung_up", id=name)
                    return None
        if finish is None:  # the package takes a stream that merely ends for a whole one
            self._end_of(call, "broken", id=name, error="the stream ended without a finish reason")
            return None
        self._end_of(call, "finished", id=name, text=text, finish=finish)
        if body["store"]:
            self._known.episodes.append((call["episode"], name))
        return text

    def _name(self) -> str:
        self._asked += 1
        return f"{self._number}-{self._asked}"

    def _end_of(self, call: dict[str, Any], how: str, **values: Any) -> None:
        self._journal.write("end", **call, how=how, **values)

    # What is not its own

    async def _try_others(self, opened: dict[str, Any]) -> None:
        """Asks with its own key for what belongs to others."""
        own = opened["episode_id"]
        others = [known for known in self._known.episodes[-200:] if known[0] != own]
        if not others:
            return
        foreign, answer = self._random.choice(others)
        root, key = self._plan["url"], {"Authorization": f"Bearer {opened['api_key']}"}
        say = {"model": "any", "max_tokens": 1, "messages": [_said("foreign")]}
        trials: list[tuple[str, str, str, dict[str, Any]]] = [
            ("stored response", "GET", f"/v1/responses/{answer}", {}),
            ("path", "POST", f"/e/{foreign}/v1/chat/completions", {"json": say}),
            (
                "header",
                "POST",
                "/v1/chat/completions",
                {"json": say, "headers": {"X-Headgate-Episode": foreign}},
            ),
            ("trajectory", "GET", f"/admin/v1/episodes/{foreign}/trajectory", {}),
            ("no key", "GET", f"/admin/v1/episodes/{foreign}", {"headers": {"Authorization": ""}}),
        ]
        what, method, path, asked = self._random.choice(trials)
        headers = {**key, **asked.pop("headers", {})}
        try:
            async with httpx.AsyncClient(base_url=root, timeout=_TIMEOUT_S) as http:
                got = await http.request(method, path, headers=headers, **asked)
        except httpx.HTTPError as error:
            self._journal.write("try", what=what, own=own, foreign=foreign, status=0, error=repr(error))
            return
        self._journal.write(
            "try", what=what, own=own, foreign=foreign, status=got.status_code, body=got.text[:300]
        )


def _said(ask: str) -> dict[str, str]:
    return {"role": "user", "content": f"[ask:{ask}] count!"}


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
    os._exit(0)  # nothing is left to be said, and idle connections need not be closed one by one
