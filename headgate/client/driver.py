"""Run an agent once per episode, `concurrency` at a time, and post its rewards, or let the gateway's graders compute them.

Owns the episodes that it opens, from opening to reward or abandonment; it owns neither the client nor the agent.
Invariants: agents' failures end the runner only when there are too many (`failures`); an episode stays open no longer
than its agent is tried; a group is begun with all its members, one after the other; cancelling the runner cancels every
running agent and abandons its episode; an agent runs no longer than the gateway keeps its episode open; each attempt has a key
and a task of its own, and whatever it raises or cancels is its own failure.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import httpx

from headgate.client.admin import GatewayClient, GatewayRefused
from headgate.client.agents import Agent, Reward, Task
from headgate.client.closings import Closings
from headgate.client.failures import FailureRate, RunStopped, pause_s
from headgate.client.foreign import RanIntoCancel, run_foreign
from headgate.client.opening import STOP_GRACE_S, Kind, Opening
from headgate.client.order import Passes, TaskOrder
from headgate.client.outcomes import Crash, EpisodeEnded, EpisodeOutcome, closed
from headgate.client.refusal import NotAGateway, no_gateway
from headgate.client.retry import GatewayUnreachable, RetryPolicy, Stopped, sleep_or_stop
from headgate.client.waits import Waits
from headgate.end_reasons import DRIVER_STOPPED, INTERRUPTED
from headgate.keys import attempt_key
from headgate.rewards import all_equal
from headgate.types import AS_REQUESTED, EpisodeMode, EpisodeOpened, EpisodeSampling

_CONFLICT, _SERVER_ERRORS = 409, 500
NO_REWARD, REWARD_REFUSED = "no_reward", "reward_refused"


@dataclass(frozen=True, slots=True)
class _Job:
    task: Task
    group_id: str
    number: int


class _Failed(Exception):
    """The error of an agent that crashed and is not started again."""


class _Closed(Exception):
    """The gateway closed the episode while its agent ran."""


class EpisodeRunner:
    """Runs `agent` on tasks, in groups of `group_size` episodes of the same task.

    `spare`: how many more are started in each group; the gateway, which must allow as many (`[staleness] spare_members`), ends
    what is left of them once it has `group_size` rewards.
    `retries`: how often a crashed agent is started again, in the same episode; what it did before is not trained.
    `open_wait_s`: how long one request waits in the gateway for a slot, before it comes again. `unreachable_s`: how long a
    gateway may give no response before the run fails. `on_outcome` is called at the end of every episode; what it raises ends the
    run. `on_wait` is called with what most episodes wait for, when that changes; empty: for nothing.
    `max_failures`: the share of the last episodes that may fail before the run is stopped. `model`: the trained model that the
    episodes are about; the gateway's first, if none is named. `sampling`: of evaluation episodes, in place of what
    agents request. `describe`: episodes are opened with their task as metadata, for the gateway's graders. `order`:
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
        self._retries = retries
        self._open_wait_s = open_wait_s
        self._waits = Waits(on_wait)
        self._retry = RetryPolicy(client.url, unreachable_s, self._waits)
        self._seed = seed
        self._on_outcome = on_outcome
        self._failures = FailureRate(max_failures, concurrency)
        self._stopped = False
        kind = Kind(group_size, mode, model, sampling, describe, open_wait_s)
        most = 1 if in_order else concurrency
        self._opening = Opening(client, kind, self._retry, self._waits, self._leave, most)
        self._closings = Closings(client, model, self._retry)
        self._order = order
        self._under_way: dict[str, list[EpisodeOutcome]] = {}
        """The outcomes so far of groups that will be reported to an order."""
        self._jitter = random.Random()
        self._run_id = uuid.uuid4().hex[:12]
        self._groups = 0

    async def run(self, tasks: Iterable[Task]) -> list[EpisodeOutcome]:
        """Run every task once, and return the outcomes in the order of the tasks. Raise GatewayUnreachable or RunStopped."""
        outcomes: dict[int, EpisodeOutcome] = {}
        await self._drive(self._jobs(tasks), outcomes.__setitem__, asyncio.Event())
        return [outcomes[index] for index in sorted(outcomes)]

    async def run_forever(self, tasks: Sequence[Task], stop: asyncio.Event) -> None:
        """Run the tasks repeatedly, by the order, until `stop` is set; then finish the open episodes.

        An episode that still waits for a slot is given up within seconds. Raise GatewayUnreachable or RunStopped.
        """
        if not tasks:
            raise ValueError("there are no tasks")
        order = self._order or Passes(tasks, self._seed)
        await self._drive(self._jobs(_until(stop, order)), partial(self._report_group, order), stop)

    def _report_group(self, order: TaskOrder, _index: int, outcome: EpisodeOutcome) -> None:
        """Report a group to the order once it has ended, and whether its rewards differ if it has two."""
        members = self._under_way.setdefault(outcome.group_id, [])
        members.append(outcome)
        if len(members) == self._group_size + self._spare:
            del self._under_way[outcome.group_id]
            rewards = [member.reward for member in members if member.reward is not None]
            order.ended(outcome.task_id, not all_equal(rewards) if len(rewards) > 1 else None)

    def _jobs(self, tasks: Iterable[Task]) -> Iterator[_Job]:
        for number, task in enumerate(tasks):
            self._groups += 1
            job = _Job(task, f"{task.task_id}-{self._run_id}-{self._groups}", number)
            for _ in range(self._group_size + self._spare):
                yield job

    async def _drive(
        self,
        jobs: Iterator[_Job],
        keep: Callable[[int, EpisodeOutcome], None],
        stop: asyncio.Event,
    ) -> None:
        numbered = enumerate(jobs)
        await self._find_gateway()
        try:
            async with asyncio.TaskGroup() as run:
                watching = run.create_task(self._watch(), name="closings")
                async with asyncio.TaskGroup() as lanes:
                    for i in range(self._concurrency):
                        lanes.create_task(self._lane(numbered, keep, stop), name=f"episodes-{i}")
                watching.cancel()
        except ExceptionGroup as group:
            raise _first(group) from group

    async def _watch(self) -> None:
        try:
            await self._closings.watch()
        except GatewayUnreachable:
            self._stopped = True
            raise

    async def _find_gateway(self) -> None:
        """Fail immediately where no gateway responds: retries are for one that has responded before. Raise
        GatewayUnreachable and NotAGateway."""
        try:
            with self._waits.slow(f"a response of the gateway at {self._client.url}"):
                await self._closings.begin()
        except httpx.TransportError as error:
            raise GatewayUnreachable(no_gateway(self._client.url, error)) from error
        except NotAGateway:
            raise
        except GatewayRefused:
            return  # the request to open an episode reports what lasts

    async def _lane(
        self,
        jobs: Iterator[tuple[int, _Job]],
        keep: Callable[[int, EpisodeOutcome], None],
        stop: asyncio.Event,
    ) -> None:
        """Play jobs until none is left. A task group would take a leaked cancellation for one of its own."""
        lane = asyncio.current_task()
        assert lane is not None
        try:
            await self._play(jobs, keep, stop)
        except asyncio.CancelledError as error:
            if not lane.cancelling():
                raise RanIntoCancel from error
            raise

    async def _play(
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
            except Exception:
                self._stopped = True
                raise
            failed = failed + 1 if outcome.error is not None else 0
            if failed and not stop.is_set():
                await sleep_or_stop(pause_s(failed, self._jitter), stop)

    async def _episode(self, job: _Job, stop: asyncio.Event) -> EpisodeOutcome:
        unopened = EpisodeOutcome(job.task.task_id, job.group_id, None, None, task_number=job.number)
        try:
            opened = await self._opening.open(job.task, job.group_id, stop)
        except GatewayRefused as refused:
            if refused.code == "group_finished":
                return replace(unopened, aborted=refused.code)
            if refused.lasts or (refused.status < _SERVER_ERRORS and refused.status != _CONFLICT):
                raise RunStopped(f"the gateway will not open any episode: {refused}") from refused
            return replace(unopened, error=f"open: {refused}")
        try:
            return await self._solve(job, opened)
        except asyncio.CancelledError:
            await self._leave(opened.episode_id)
            raise

    async def _solve(self, job: _Job, opened: EpisodeOpened) -> EpisodeOutcome:
        """Run the agent, and end its episode."""
        started = time.monotonic()
        crashes: list[Crash] = []
        try:
            reward = await self._attempt(job.task, opened, crashes)
        except _Failed:
            last = crashes[-1]
            ended = await self._give_up(opened.episode_id, last.reason, last.summary, last.report)
            attempts = len(crashes)
        except _Closed:
            ended = await self._gateway_end(opened.episode_id)
            attempts = len(crashes) + 1
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
            tuple(crash.summary for crash in crashes),
            time.monotonic() - started,
            ended.notice,
            job.number,
        )

    async def _attempt(self, task: Task, opened: EpisodeOpened, crashes: list[Crash]) -> Reward | None:
        """Return the agent's reward, and add crashes to `crashes`. Raise _Failed once it may not be restarted, and _Closed."""
        key, over = opened.api_key, self._closings.of(opened.episode_id)
        try:
            while True:
                try:
                    started = partial(self._agent, task, opened.base_url, key)
                    with self._waits.slow("agents to finish"):
                        reward = await run_foreign(started, f"agent-{opened.episode_id}", until=over)
                except Exception as error:
                    crashes.append(Crash.of(error))
                else:
                    if over.done():
                        raise _Closed
                    return reward
                attempt = len(crashes) <= self._retries and await self._restart(opened.episode_id)
                if not attempt:
                    raise _Failed
                key = attempt_key(opened.api_key, attempt)
                await asyncio.sleep(pause_s(len(crashes), self._jitter))
        finally:
            self._closings.forget(opened.episode_id)

    async def _leave(self, episode_id: str) -> None:
        """Abandon an episode of a run that ends, so that its slot is free, unless the gateway does not respond."""
        with suppress(GatewayRefused, httpx.TransportError, TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S):
                await self._client.abandon(episode_id, DRIVER_STOPPED if self._stopped else INTERRUPTED)

    async def _restart(self, episode_id: str) -> int:
        """Restart the episode after a crash of its agent. Return the attempt's number; 0 if the episode has ended."""
        try:
            return await self._retry.call(
                f"restart episode {episode_id}", lambda: self._client.restart(episode_id)
            )
        except GatewayRefused:
            return 0

    async def _end(self, episode_id: str, reward: Reward | None) -> EpisodeEnded:
        """Post a reward; without one, the episode is graded."""
        if reward is None:
            return await self._grade(episode_id)
        components = reward.components or None
        rest = reward.reward - sum(reward.calls.values())

        def request() -> Awaitable[dict[str, Any]]:
            return self._client.reward(episode_id, rest, components)

        try:
            await self._reward_calls(episode_id, reward)
            response = await self._retry.call(f"reward episode {episode_id}", request)
        except GatewayRefused as refused:
            if refused.code == "episode_closed":
                return await self._gateway_end(episode_id)
            return await self._give_up(episode_id, REWARD_REFUSED, f"reward: {refused}")
        if not response["accepted"]:
            return closed(response["reason"], response["notice"])
        return EpisodeEnded(reward, notice=response["notice"])

    async def _reward_calls(self, episode_id: str, reward: Reward) -> None:
        for call_id, earned in reward.calls.items():
            await self._retry.call(
                f"reward call {call_id}", partial(self._client.call_reward, episode_id, call_id, earned)
            )

    async def _give_up(self, episode_id: str, reason: str, error: str, report: str = "") -> EpisodeEnded:
        """Abandon an episode, so that its slot is free immediately."""

        def request() -> Awaitable[None]:
            return self._client.abandon(episode_id, reason, report or error)

        try:
            await self._retry.call(f"abandon episode {episode_id}", request)
        except GatewayRefused as refused:
            if refused.code == "episode_closed":
                return await self._gateway_end(episode_id, error)
            return EpisodeEnded(error=f"{error}; abandon: {refused}")
        return EpisodeEnded(error=error)

    async def _grade(self, episode_id: str) -> EpisodeEnded:
        """Close an episode, and wait until the gateway has its reward."""

        def request() -> Awaitable[dict[str, Any]]:
            return self._client.close_episode(episode_id, self._open_wait_s)

        state = "grading"
        try:
            while state == "grading":
                with self._waits.slow("graders to compute rewards"):
                    response = await self._retry.call(f"close episode {episode_id}", request)
                state = response["state"]
        except GatewayRefused as refused:
            return await self._give_up(episode_id, NO_REWARD, f"close: {refused}")
        if response["reason"] == "rewarded":
            return EpisodeEnded(Reward(response["reward"], response["components"] or {}))
        return closed(response["reason"], response["error"])

    async def _gateway_end(self, episode_id: str, error: str | None = None) -> EpisodeEnded:
        """Return how the gateway ended an episode by itself."""
        row = await self._retry.call("look at an episode", lambda: self._client.episode(episode_id))
        return closed(row["reason"], error or row["error"])


def _first(error: Exception) -> Exception:
    """Return the first error of a group, or of a group in it."""
    return _first(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error


def _until(stop: asyncio.Event, order: TaskOrder) -> Iterator[Task]:
    while not stop.is_set():
        yield order.next()
