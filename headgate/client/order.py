"""The order in which tasks are played again and again: in shuffled passes, or by difficulty. Pure: no clock, no I/O.

By difficulty, a task whose groups end with equal rewards, so that they teach nothing, is visited less: its weight falls with
each of them, toward `floor`, and rises with each group that differs. A task of half the weight comes half as often. Old groups
count less than new ones, so a task that has become learnable is found; one that was never played has the full weight. While all
weights are equal, this too is passes over all tasks. What a group costs grows with the logarithm of the number of tasks.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from headgate.client.agents import Task

_MEMORY = 0.9
"""The weight of a group, once another group of the same task has ended."""
_STALE = 4
"""The times in the heap for each task, at most."""


class TaskOrder(Protocol):
    """Chooses the next task."""

    def next(self) -> Task:
        """Return the task of the next group."""

    def ended(self, task_id: str, teaches: bool | None) -> None:
        """Take a group that is over, and whether its rewards differ; None: it has too few."""


class Lasting(TaskOrder, Protocol):
    """An order that a later run can continue."""

    def state(self) -> dict[str, Any]:
        """Return the records of all tasks, by id, which `restore` takes, as JSON."""

    def record(self, task_id: str) -> list[float]:
        """Return a task's part of the state."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. New tasks join where the others are; tasks that no longer exist are forgotten."""


class Passes:
    """Every task once, in an order by chance, and again in another.

    The order of each pass follows from the seed and the pass alone. The state is the number of each task's groups that are over,
    so a group that was under way when a run ended comes again.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self._tasks = tasks
        self._seed = seed
        self._over = dict.fromkeys((task.task_id for task in tasks), 0)
        self._skip: dict[str, int] = {}
        """The pass in which each task that an earlier run played comes again."""
        self._pass = 0
        self._left: list[Task] = []

    def next(self) -> Task:
        while not self._left:
            order = random.Random(f"{self._seed}-{self._pass}").sample(self._tasks, len(self._tasks))
            self._left = [task for task in order[::-1] if self._skip.get(task.task_id, 0) <= self._pass]
            self._pass += 1
        return self._left.pop()

    def ended(self, task_id: str, teaches: bool | None) -> None:
        self._over[task_id] += 1

    def state(self) -> dict[str, Any]:
        return {task_id: self.record(task_id) for task_id in self._over}

    def record(self, task_id: str) -> list[float]:
        return [self._over[task_id]]

    def restore(self, state: Mapping[str, Any]) -> None:
        known = {task_id: int(*state[task_id]) for task_id in self._over if task_id in state}
        self._pass = min(known.values(), default=0)
        self._over = {task_id: known.get(task_id, self._pass) for task_id in self._over}
        self._skip, self._left = dict(self._over), []


class SharedOrder:
    """One order for `count` runs that play the same tasks in the same order: each run has one of `views`.

    A group has ended once it has in every run.
    """

    def __init__(self, order: TaskOrder, count: int) -> None:
        self._order = order
        self._ended = [Counter[str]() for _ in range(count)]
        self._reported = Counter[str]()
        self._queues: list[deque[Task]] = [deque() for _ in range(count)]
        """The tasks that each run has still to begin, of those that another run has begun."""
        self.views: list[TaskOrder] = [_View(self, number) for number in range(count)]

    def next(self, view: int) -> Task:
        """Return the next task of a run."""
        if not self._queues[view]:
            task = self._order.next()
            for queue in self._queues:
                queue.append(task)
        return self._queues[view].popleft()

    def ended(self, view: int, task_id: str, teaches: bool | None) -> None:
        """Record that a group of a run has ended."""
        self._ended[view][task_id] += 1
        if min(ended[task_id] for ended in self._ended) > self._reported[task_id]:
            self._reported[task_id] += 1
            self._order.ended(task_id, teaches)


@dataclass(frozen=True, slots=True)
class _View:
    shared: SharedOrder
    number: int

    def next(self) -> Task:
        return self.shared.next(self.number)

    def ended(self, task_id: str, teaches: bool | None) -> None:
        self.shared.ended(self.number, task_id, teaches)


@dataclass(frozen=True, slots=True)
class Visits:
    """The record of a task: when it was begun, and how many of its groups taught."""

    at: float
    """When it was begun last, on a clock that runs by 1 from a visit of a task with the weight 1 to its next."""
    groups: float = 0.0
    taught: float = 0.0
    """The part of `groups` whose rewards differed; both numbers fade."""

    def weight(self, floor: float) -> float:
        """Return how often it is played, compared with a task that was never played."""
        return max(floor, (self.taught + 1.0) / (self.groups + 1.0))

    def due(self, floor: float) -> float:
        """When it is to be begun next."""
        return self.at + 1.0 / self.weight(floor)

    def after(self, teaches: bool) -> Visits:
        """Return the same after a group."""
        return replace(
            self, groups=_MEMORY * self.groups + 1.0, taught=_MEMORY * self.taught + float(teaches)
        )


class ByDifficulty:
    """Tasks by what their groups taught; `floor`: the least weight."""

    def __init__(self, tasks: Sequence[Task], seed: int, floor: float) -> None:
        if not 0 < floor <= 1:
            raise ValueError(f"the floor of a task's weight is above 0 and at most 1, not {floor}")
        chance = random.Random(seed)
        self._tasks = {task.task_id: task for task in tasks}
        self._floor = floor
        self._visits = {task_id: Visits(chance.random() - 1.0) for task_id in self._tasks}
        self._due: list[tuple[float, str]] = []
        """A heap: for each task when it is due, and times at which it is not due any more."""
        self._sort()

    def next(self) -> Task:
        due, task_id = heapq.heappop(self._due)
        while due != self._visits[task_id].due(self._floor):
            due, task_id = heapq.heappop(self._due)
        self._keep(task_id, replace(self._visits[task_id], at=due))
        return self._tasks[task_id]

    def ended(self, task_id: str, teaches: bool | None) -> None:
        if teaches is not None:
            self._keep(task_id, self._visits[task_id].after(teaches))

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each task."""
        return {task_id: visits.weight(self._floor) for task_id, visits in self._visits.items()}

    def state(self) -> dict[str, Any]:
        return {task_id: self.record(task_id) for task_id in self._visits}

    def record(self, task_id: str) -> list[float]:
        visits = self._visits[task_id]
        return [visits.at, visits.groups, visits.taught]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with a state. New tasks owe no visits of the past."""
        known = {task_id: Visits(*map(float, state[task_id])) for task_id in self._tasks if task_id in state}
        now = min((visits.due(self._floor) for visits in known.values()), default=0.0)
        shifted = {task_id: replace(visits, at=visits.at + now) for task_id, visits in self._visits.items()}
        self._visits = {**shifted, **known}
        self._sort()

    def _keep(self, task_id: str, visits: Visits) -> None:
        self._visits[task_id] = visits
        heapq.heappush(self._due, (visits.due(self._floor), task_id))
        if len(self._due) > _STALE * len(self._visits):
            self._sort()

    def _sort(self) -> None:
        self._due = [(visits.due(self._floor), task_id) for task_id, visits in self._visits.items()]
        heapq.heapify(self._due)
