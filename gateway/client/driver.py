"""Runs an agent once per episode, `concurrency` at a time, and posts its rewards, or has the gateway's graders compute them.

Owns the episodes that it opens, from opening to reward or abandonment; neither the client nor the agent is its own.
Invariants: an agent's failure never ends the runner; an episode is open for no longer than its agent's tries; a group that
was begun is begun with all its members, one after the other; cancelling the runner cancels every agent that runs, and the
gateway's deadlines then close the episodes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from gateway.client.admin import GatewayClient, GatewayRefused
from gateway.client.agents import Agent, Reward, Task
from gateway.types import EpisodeMode, EpisodeOpened

_log = logging.getLogger(__name__)

T = TypeVar("T")

_GIVEN_UP = frozenset(
    (
        "surplus",
        "zero_variance",
        "too_few_rewards",
        "stale",
        "no_room",
        "retry",
        "truncated",
        "untrained_late",
    )
)
"""Why the staleness ledger gives an episode up: no fault of its agent."""

_COME_AGAIN = (429, 503)
_RETRY_AFTER_S = 1.0
_FIRST_BACKOFF_S = 0.2
_LAST_BACKOFF_S = 5.0
_STOP_GRACE_S = 5.0


class GatewayUnreachable(Exception):
    """The gateway gave no answer for too long; the message names the step."""


@dataclass(frozen=True, slots=True)
class EpisodeOutcome:
    """What became of one episode: a reward that the gateway took, an abort, or an error."""

    task_id: str
    group_id: str
    episode_id: str | None
    """None if the gateway refused to open it."""
    reward: float | None
    components: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    aborted: str | None = None
    """Why the gateway had no use for the episode any more; it has no reward then, and no error."""
    attempts: int = 0
    """How often the agent was started."""
    seconds: float = 0.0
    """From admission to reward or abandonment."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """How an episode ended: exactly one of them is there."""

    reward: Reward | None = None
    error: str | None = None
    aborted: str | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    task: Task
    group_id: str


class _Stopped(Exception):
    pass


class EpisodeRunner:
    """Runs `agent` on tasks, in groups of `group_size` episodes of the same task.

    `spare`: how many more are started in each group; the gateway, which must allow as many (`[staleness] spare_members`), ends
    what is left of them once it has `group_size` rewards.
    `retries`: how often a crashed agent is started again, in the same episode; what it did before is not trained.
    `open_wait_s`: how long one request waits in the gateway for a slot, before it comes again. `unreachable_s`: how long a
    gateway may give no answer before the run fails. `on_outcome` is called at the end of every episode; what it raises ends the
    run. `model`: the trained model that the episodes are about; the gateway's first, if none is named.
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
        model: str | None = None,
    ) -> None:
        if group_size < 1 or concurrency < 1 or retries < 0 or spare < 0:
            raise ValueError("group_size and concurrency must be >= 1, retries and spare >= 0")
        if spare and mode == "eval":
            raise ValueError("spare members are for training: every evaluation episode counts")
        self._client = client
        self._agent = agent
        self._group_size = group_size
        self._spare = spare
        self._concurrency = concurrency
        self._mode: EpisodeMode = mode
        self._retries = retries
        self._open_wait_s = open_wait_s
        self._unreachable_s = unreachable_s
        self._seed = seed
        self._on_outcome = on_outcome
        self._model = model
        self._jitter = random.Random()
        self._run_id = uuid.uuid4().hex[:12]
        self._groups = 0

    async def run(self, tasks: Iterable[Task]) -> list[EpisodeOutcome]:
        """Every task once; the outcomes in the order of the tasks. Raises GatewayUnreachable."""
        outcomes: dict[int, EpisodeOutcome] = {}
        await self._drive(self._jobs(tasks), outcomes.__setitem__, asyncio.Event())
        return [outcomes[index] for index in sorted(outcomes)]

    async def run_forever(self, tasks: Sequence[Task], stop: asyncio.Event) -> None:
        """The tasks again and again, each pass in another order, until `stop` is set; then finishes what it began.

        An episode that still waits for a slot is given up within seconds. Raises GatewayUnreachable.
        """
        if not tasks:
            raise ValueError("there are no tasks")
        await self._drive(self._jobs(self._shuffled(tasks, stop)), _keep_nothing, stop)

    def _shuffled(self, tasks: Sequence[Task], stop: asyncio.Event) -> Iterator[Task]:
        order = random.Random(self._seed)
        while True:
            for task in order.sample(tasks, len(tasks)):
                if stop.is_set():
                    return
                yield task

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
        for index, job in jobs:
            try:
                outcome = await self._episode(job, stop)
            except _Stopped:
                return
            keep(index, outcome)
            if self._on_outcome is not None:
                self._on_outcome(outcome)

    async def _episode(self, job: _Job, stop: asyncio.Event) -> EpisodeOutcome:
        task_id = job.task.task_id
        try:
            opened = await self._open(job, stop)
        except GatewayRefused as refused:
            if refused.code == "group_finished":
                return EpisodeOutcome(task_id, job.group_id, None, None, aborted=refused.code)
            return EpisodeOutcome(task_id, job.group_id, None, None, error=f"open: {refused}")
        started = time.monotonic()
        answer, error, attempts = await self._attempt(job.task, opened)
        ended = await self._end(opened.episode_id, answer, error)
        return EpisodeOutcome(
            task_id,
            job.group_id,
            opened.episode_id,
            ended.reward.reward if ended.reward else None,
            ended.reward.components if ended.reward else {},
            ended.error,
            ended.aborted,
            attempts,
            time.monotonic() - started,
        )

    async def _attempt(self, task: Task, opened: EpisodeOpened) -> tuple[Reward | None, str | None, int]:
        error, attempts = "", 0
        while attempts <= self._retries and (not attempts or await self._restarted(opened.episode_id)):
            attempts += 1
            try:
                reward = await self._agent(task, opened.base_url, opened.api_key)
            except Exception as crash:
                error = f"{type(crash).__name__}: {crash}"
                _log.warning("episode %s, attempt %d: %s", opened.episode_id, attempts, error)
            else:
                return reward, None, attempts
        return None, error, attempts

    async def _open(self, job: _Job, stop: asyncio.Event) -> EpisodeOpened:
        again = secrets.token_hex(16)

        def request() -> Awaitable[EpisodeOpened]:
            return self._client.open_episode(
                job.task.task_id,
                job.group_id,
                self._group_size,
                self._mode,
                wait_s=self._open_wait_s,
                model=self._model,
                idempotency_key=again,
            )

        opening = asyncio.ensure_future(self._insist("open an episode", request, stop))
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():  # a member of a group that was begun needs no slot, and is let in at once
                await asyncio.wait({opening}, timeout=_STOP_GRACE_S)
            if not opening.done():
                raise _Stopped
            return opening.result()
        finally:
            stopping.cancel()
            opening.cancel()

    async def _restarted(self, episode_id: str) -> bool:
        """Has the gateway forget what a crashed agent did. False: the episode is over, so that there is no second try."""
        try:
            await self._insist(f"restart episode {episode_id}", lambda: self._client.restart(episode_id))
        except GatewayRefused:
            return False
        return True

    async def _end(self, episode_id: str, reward: Reward | None, error: str | None) -> _Ended:
        """Tells the gateway the end of an episode: a reward, an error, or neither, and then it is graded."""
        if error is None and reward is None:
            return await self._grade(episode_id)

        def request() -> Awaitable[None]:
            if reward is None:
                return self._client.abandon(episode_id, (error or "")[:500])
            return self._client.reward(episode_id, reward.reward, reward.components or None)

        step = "abandon" if reward is None else "reward"
        try:
            await self._insist(f"{step} episode {episode_id}", request)
        except GatewayRefused as refused:
            if refused.code == "episode_closed":
                row = await self._insist("look at an episode", lambda: self._client.episode(episode_id))
                return _closed(row["reason"], error)
            return _Ended(error="; ".join(filter(None, (error, f"{step}: {refused}"))))
        return _Ended(reward, error)

    async def _grade(self, episode_id: str) -> _Ended:
        """Closes an episode and waits until the gateway has its reward."""

        def request() -> Awaitable[dict[str, Any]]:
            return self._client.close_episode(episode_id, self._open_wait_s)

        state = "grading"
        try:
            while state == "grading":
                fate = await self._insist(f"close episode {episode_id}", request)
                state = fate["state"]
        except GatewayRefused as refused:  # nothing would reward it: its slot is free at once
            return await self._end(episode_id, None, f"close: {refused}")
        if fate["reason"] == "rewarded":
            return _Ended(Reward(fate["reward"], fate["components"] or {}))
        return _closed(fate["reason"])

    async def _insist(
        self, step: str, request: Callable[[], Awaitable[T]], stop: asyncio.Event | None = None
    ) -> T:
        """Repeats a request until the gateway answers other than "come again", or nothing for `unreachable_s`."""
        silent_since: float | None = None
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                return await request()
            except GatewayRefused as refused:
                if refused.status not in _COME_AGAIN:
                    raise
                if stop is not None and stop.is_set():
                    raise _Stopped from refused
                silent_since, backoff_s = None, _FIRST_BACKOFF_S
                pause_s = refused.retry_after or _RETRY_AFTER_S
            except httpx.TransportError as error:
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since >= self._unreachable_s:
                    message = f"step '{step}': no answer for {self._unreachable_s:g} s: {error!r}"
                    raise GatewayUnreachable(message) from error
                pause_s, backoff_s = backoff_s, min(2 * backoff_s, _LAST_BACKOFF_S)
            await _rest(pause_s * self._jitter.uniform(1.0, 1.5), stop)


async def _rest(seconds: float, stop: asyncio.Event | None) -> None:
    """Sleeps; a stop ends the sleep, for a group that was begun meanwhile wants all its members."""
    if stop is None or stop.is_set():
        await asyncio.sleep(seconds)
        return
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return


def _closed(reason: str, error: str | None = None) -> _Ended:
    """Of an episode that the gateway closed without a reward."""
    if reason in _GIVEN_UP:
        return _Ended(aborted=reason)
    return _Ended(error="; ".join(filter(None, (error, f"closed by the gateway: {reason}"))))


def _keep_nothing(_index: int, _outcome: EpisodeOutcome) -> None:
    pass
