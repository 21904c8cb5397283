"""Runs an agent once per episode, `concurrency` at a time, and posts its rewards, or has the gateway's graders compute
them.

Owns the episodes that it opens, from opening to reward or abandonment; it owns neither the client nor the agent.
Invariants: agents' failures end the runner only when there are too many (`failures`); an episode stays open no longer
than its agent is tried; a group is begun with all its members, one after the other; cancelling the runner cancels every
running agent, and the gateway's deadlines then close the episodes.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from gateway.client.admin import GatewayClient, GatewayRefused
from gateway.client.agents import Agent, Reward, Task
from gateway.client.failures import FailureRate, RunStopped, pause_s
from gateway.client.order import Passes, TaskOrder
from gateway.client.outcomes import Crash, Ended, EpisodeOutcome, closed
from gateway.client.patience import Patience, Stopped, rest
from gateway.types import AS_REQUESTED, EpisodeMode, EpisodeOpened, EpisodeSampling
from scheduler.policies.rewards import all_equal

_CONFLICT, _SERVER_ERRORS = 409, 500
_STOP_GRACE_S = 5.0
_FIRST_WAIT_S = 2.0
"""The time that the first request to open an episode waits in the gateway: a longer wait is reported with its reason."""
NO_REWARD = "no_reward"
DRIVER_STOPPED = "driver_stopped"


@dataclass(frozen=True, slots=True)
class _Job:
    task: Task
    group_id: str


class _Failed(Exception):
    """The error of an agent that crashed and is not started again."""


class EpisodeRunner:
    """Runs `agent` on tasks, in groups of `group_size` episodes of the same task.

    `spare`: how many more are started in each group; the gateway, which must allow as many (`[staleness] spare_members`), ends
    what is left of them once it has `group_size` rewards.
    `retries`: how often a crashed agent is started again, in the same episode; what it did before is not trained.
    `open_wait_s`: how long one request waits in the gateway for a slot, before it comes again. `unreachable_s`: how long a
    gateway may give no answer before the run fails. `on_outcome` is called at the end of every episode; what it raises ends the
    run. `on_wait` is called with what episodes wait for before they are opened, when that changes; empty: for nothing.
    `max_failures`: the share of the last episodes that may fail before the run is stopped. `model`: the trained model that the
    episodes are about; the gateway's first, if none is named. `sampling`: of evaluation episodes, in place of what
    agents ask for. `describe`: episodes are opened with their task as metadata, for the gateway's graders. `order`:
    of the tasks of `run_forever`; shuffled passes, if there is none. `in_order`: an episode is opened only when those of earlier
    tasks are.
    """

    def __init__(
        self,
        client: GatewayClient,
        agent: Agent,
        *,
        group_size: int = 1,
        spare: int = 0,
        concurrency: int = 8,
        mode: EpisodeMode = "train",
        retries: int = 1,
        open_wait_s: float = 30.0,
        unreachable_s: float = 60.0,
        seed: int = 0,
        on_outcome: Callable[[EpisodeOutcome], None] | None = None,
        on_wait: Callable[[str], None] | None = None,
        max_failures: float = 0.5,
        model: str | None = None,
        sampling: EpisodeSampling = AS_REQUESTED,
        describe: bool = False,
        order: TaskOrder | None = None,
        in_order: bool = False,
    ) -> None:
        if group_size < 1 or concurrency < 1 or retries < 0 or spare < 0:
            raise ValueError("group_size and concurrency must be >= 1, retries and spare >= 0")
        if spare and mode == "eval":
            raise ValueError("spare is for training: evaluations count every episode")
        self._client = client
        self._agent = agent
        self._group_size = group_size
        self._spare = spare
        self._concurrency = concurrency
        self._mode: EpisodeMode = mode
        self._retries = retries
        self._open_wait_s = open_wait_s
        self._patience = Patience(unreachable_s)
        self._seed = seed
        self._on_outcome = on_outcome
        self._on_wait = on_wait
        self._waiting: dict[str, str] = {}
        """The reason why each episode that is not open yet waits, by its Idempotency-Key."""
        self._waits_for = ""
        self._failures = FailureRate(max_failures, concurrency)
        self._stopped = False
        self._model = model
        self._sampling = sampling
        self._describe = describe
        self._order = order
        self._opening = asyncio.Semaphore(1 if in_order else concurrency)
        self._under_way: dict[str, list[EpisodeOutcome]] = {}
        """The outcomes so far of groups of which an order is to hear."""
        self._jitter = random.Random()
        self._run_id = uuid.uuid4().hex[:12]
        self._groups = 0

    async def run(self, tasks: Iterable[Task]) -> list[EpisodeOutcome]:
        """Every task once; the outcomes in the order of the tasks. Raises GatewayUnreachable or RunStopped."""
        outcomes: dict[int, EpisodeOutcome] = {}
        await self._drive(self._jobs(tasks), outcomes.__setitem__, asyncio.Event())
        return [outcomes[index] for index in sorted(outcomes)]

    async def run_forever(self, tasks: Sequence[Task], stop: asyncio.Event) -> None:
        """The tasks again and again, by the order, until `stop` is set; then finishes what it began.

        An episode that still waits for a slot is given up within seconds. Raises GatewayUnreachable or RunStopped.
        """
        if not tasks:
            raise ValueError("there are no tasks")
        order = self._order or Passes(tasks, self._seed)
        await self._drive(self._jobs(_until(stop, order)), partial(self._tell, order), stop)

    def _tell(self, order: TaskOrder, _index: int, outcome: EpisodeOutcome) -> None:
        """Tells the order of a group once it is over, if two of its members at least were rewarded."""
        members = self._under_way.setdefault(outcome.group_id, [])
        members.append(outcome)
        if len(members) == self._group_size + self._spare:
            del self._under_way[outcome.group_id]
            rewards = [member.reward for member in members if member.reward is not None]
            if len(rewards) > 1:
                order.ended(outcome.task_id, not all_equal(rewards))

    def _jobs(self, tasks: Iterable[Task]) -> Iterator[_Job]:
        for task in tasks:
            self._groups += 1
            job = _Job(task, f"{task.task_id}-{self._run_id}-{self._groups}")
            for _ in range(self._group_size + self._spare):
                yield job

    async def _drive(
        self,
        jobs: Iterator[_Job],
        keep: Callable[[int, EpisodeOutcome], None],
        stop: asyncio.Event,
    ) -> None:
        numbered = enumerate(jobs)
        try:
            async with asyncio.TaskGroup() as lanes:
                for i in range(self._concurrency):
                    lanes.create_task(self._lane(numbered, keep, stop), name=f"episodes-{i}")
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _lane(
        self,
        jobs: Iterator[tuple[int, _Job]],
        keep: Callable[[int, EpisodeOutcome], None],
        stop: asyncio.Event,
    ) -> None:
        failed = 0
        for index, job in jobs:
            try:
                outcome = await self._episode(job, stop)
                keep(index, outcome)
                if self._on_outcome is not None:
                    self._on_outcome(outcome)
                if outcome.aborted is None:
                    self._failures.add(outcome.error)
            except Stopped:
                return
            except RunStopped:
                self._stopped = True
                raise
            failed = failed + 1 if outcome.error is not None else 0
            if failed and not stop.is_set():
                await rest(pause_s(failed, self._jitter), stop)

    async def _episode(self, job: _Job, stop: asyncio.Event) -> EpisodeOutcome:
        task_id = job.task.task_id
        try:
            async with self._opening:  # first come, first served
                opened = await self._open(job, stop)
        except GatewayRefused as refused:
            if refused.code == "group_finished":
                return EpisodeOutcome(task_id, job.group_id, None, None, aborted=refused.code)
            if refused.status < _SERVER_ERRORS and refused.status != _CONFLICT:
                raise RunStopped(f"the gateway will not open any episode: {refused}") from refused
            return EpisodeOutcome(task_id, job.group_id, None, None, error=f"open: {refused}")
        try:
            return await self._solve(job, opened)
        except asyncio.CancelledError:
            if self._stopped:
                await self._leave(opened.episode_id)
            raise

    async def _solve(self, job: _Job, opened: EpisodeOpened) -> EpisodeOutcome:
        """Runs the agent, and ends its episode."""
        started = time.monotonic()
        crashes: list[Crash] = []
        try:
            reward = await self._attempt(job.task, opened, crashes)
        except _Failed:
            last = crashes[-1]
            ended = await self._give_up(opened.episode_id, last.reason, last.said, last.report)
            attempts = len(crashes)
        else:
            ended = await self._end(opened.episode_id, reward)
            attempts = len(crashes) + 1
        return EpisodeOutcome(
            job.task.task_id,
            job.group_id,
            opened.episode_id,
            ended.reward.reward if ended.reward else None,
            ended.reward.components if ended.reward else {},
            ended.error,
            ended.aborted,
            attempts,
            tuple(crash.said for crash in crashes),
            time.monotonic() - started,
            ended.notice,
        )

    async def _attempt(self, task: Task, opened: EpisodeOpened, crashes: list[Crash]) -> Reward | None:
        """The agent's answer; its crashes are added to `crashes`. Raises _Failed once it may not be started again."""
        while True:
            try:
                return await self._agent(task, opened.base_url, opened.api_key)
            except Exception as error:
                crashes.append(Crash.of(error))
            if len(crashes) > self._retries or not await self._restarted(opened.episode_id):
                raise _Failed
            await asyncio.sleep(pause_s(len(crashes), self._jitter))

    async def _leave(self, episode_id: str) -> None:
        """Abandons an episode of a stopped run, so that its slot is free at once, unless the gateway does not answer."""
        with suppress(GatewayRefused, httpx.TransportError, TimeoutError):
            async with asyncio.timeout(_STOP_GRACE_S):
                await self._client.abandon(episode_id, DRIVER_STOPPED)

    async def _leave_once_open(self, opening: asyncio.Future[EpisodeOpened]) -> None:
        """The same for an episode that the gateway may be opening just now."""
        await asyncio.wait({opening}, timeout=_STOP_GRACE_S)
        if opening.done() and not opening.cancelled() and opening.exception() is None:
            await self._leave(opening.result().episode_id)

    async def _open(self, job: _Job, stop: asyncio.Event) -> EpisodeOpened:
        again = secrets.token_hex(16)
        wait_s = min(_FIRST_WAIT_S, self._open_wait_s)

        def request() -> Awaitable[EpisodeOpened]:
            return self._client.open_episode(
                job.task.task_id,
                job.group_id,
                self._group_size,
                self._mode,
                metadata=job.task.data if self._describe else None,
                wait_s=wait_s,
                model=self._model,
                idempotency_key=again,
                sampling=self._sampling,
            )

        async def sent_away(refused: GatewayRefused) -> None:
            nonlocal wait_s
            wait_s = self._open_wait_s
            self._waits(again, await self._client.not_ready() or refused.message)

        opening = asyncio.ensure_future(self._patience.insist("open an episode", request, stop, sent_away))
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():  # a member of a started group needs no slot and is admitted at once
                await asyncio.wait({opening}, timeout=_STOP_GRACE_S)
            if not opening.done():
                raise Stopped
            return opening.result()
        except asyncio.CancelledError:
            if self._stopped:
                await self._leave_once_open(opening)
            raise
        finally:
            stopping.cancel()
            opening.cancel()
            self._waits(again, "")

    def _waits(self, episode: str, what: str) -> None:
        """Records why an episode cannot be opened yet; empty: it can."""
        self._waiting.pop(episode, None)
        if what:
            self._waiting[episode] = what
        most = Counter(self._waiting.values()).most_common(1)
        said = most[0][0] if most else ""
        if said != self._waits_for:
            self._waits_for = said
            if self._on_wait is not None:
                self._on_wait(said)

    async def _restarted(self, episode_id: str) -> bool:
        """Restart the episode after a crash of its agent. Returns False if the episode is over and must not be tried again."""
        try:
            await self._patience.insist(
                f"restart episode {episode_id}", lambda: self._client.restart(episode_id)
            )
        except GatewayRefused:
            return False
        return True

    async def _end(self, episode_id: str, reward: Reward | None) -> Ended:
        """Tells the gateway a reward; without one, the episode is graded."""
        if reward is None:
            return await self._grade(episode_id)
        components = reward.components or None
        beside = reward.reward - sum(reward.calls.values())

        def request() -> Awaitable[dict[str, Any]]:
            return self._client.reward(episode_id, beside, components)

        try:
            await self._reward_calls(episode_id, reward)
            taken = await self._patience.insist(f"reward episode {episode_id}", request)
        except GatewayRefused as refused:
            if refused.code == "episode_closed":
                return await self._fate(episode_id)
            return await self._give_up(episode_id, NO_REWARD, f"reward: {refused}")
        if not taken["accepted"]:
            return closed(taken["reason"], taken["notice"])
        return Ended(reward, notice=taken["notice"])

    async def _reward_calls(self, episode_id: str, reward: Reward) -> None:
        for call_id, earned in reward.calls.items():
            await self._patience.insist(
                f"reward call {call_id}", partial(self._client.call_reward, episode_id, call_id, earned)
            )

    async def _give_up(self, episode_id: str, reason: str, error: str, report: str = "") -> Ended:
        """Leaves an episode out of its group, so that its slot is free at once."""

        def request() -> Awaitable[None]:
            return self._client.abandon(episode_id, reason, report or error)

        try:
            await self._patience.insist(f"abandon episode {episode_id}", request)
        except GatewayRefused as refused:
            if refused.code == "episode_closed":
                return await self._fate(episode_id, error)
            return Ended(error=f"{error}; abandon: {refused}")
        return Ended(error=error)

    async def _grade(self, episode_id: str) -> Ended:
        """Closes an episode and waits until the gateway has its reward."""

        def request() -> Awaitable[dict[str, Any]]:
            return self._client.close_episode(episode_id, self._open_wait_s)

        state = "grading"
        try:
            while state == "grading":
                fate = await self._patience.insist(f"close episode {episode_id}", request)
                state = fate["state"]
        except GatewayRefused as refused:
            return await self._give_up(episode_id, NO_REWARD, f"close: {refused}")
        if fate["reason"] == "rewarded":
            return Ended(Reward(fate["reward"], fate["components"] or {}))
        return closed(fate["reason"], fate["error"])

    async def _fate(self, episode_id: str, error: str | None = None) -> Ended:
        """How the gateway ended an episode by itself."""
        row = await self._patience.insist("look at an episode", lambda: self._client.episode(episode_id))
        return closed(row["reason"], error or row["error"])


def _until(stop: asyncio.Event, order: TaskOrder) -> Iterator[Task]:
    while not stop.is_set():
        yield order.next()
