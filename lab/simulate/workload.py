"""The workload: groups of episodes, each with turns of given lengths and waits for tools between them.

A workload is a function of the seed and of a group's number alone, so that every policy gets the same groups in the same
order (common random numbers), and one that drops a group has the same next one. Lengths are a quantile function; the
members of a group share the difficulty of their task (a Gaussian copula with correlation `likeness`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np

from lab.simulate.errors import ScenarioError

_NORMAL = NormalDist()
LONG_TAIL = (
    (0.0, 0.15), (0.25, 0.6), (0.5, 1.0), (0.75, 1.9), (0.9, 4.5), (0.95, 8.0), (0.98, 15.0), (0.995, 24.0), (1.0, 28.0)
)  # fmt: skip
"""Lengths over the median by quantile. The longest is 28 times the median; where an engine gets two calls for each of its slots,
the last tenth of the replies takes about half of a synchronous rollout (verl's README; tests check both)."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One call: `prompt` new tokens, then `sampled` ones, then a tool that takes `wait_s`."""

    prompt: int
    sampled: int
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Task:
    """A group: the turns of each of its episodes."""

    episodes: tuple[tuple[Turn, ...], ...]

    @property
    def sampled(self) -> int:
        """Tokens that are sampled in it."""
        return sum(turn.sampled for turns in self.episodes for turn in turns)


class Workload(Protocol):
    """Groups by number."""

    def task(self, number: int) -> Task:
        """Return the group of that number, always the same."""

    @property
    def longest(self) -> int:
        """Tokens of the longest context that there can be."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of a turn's replies."""

    kind: str = "lognormal"
    """`lognormal` with `sigma`, `tail` (LONG_TAIL), or `constant`."""
    median: float = 1000.0
    sigma: float = 0.9
    longest: int = 28000
    growth: float = 0.0
    """The share by which replies become longer with every batch that was begun."""

    def at(self, quantile: float, batch: float) -> int:
        """Return the length at a quantile, in tokens, at least 1."""
        match self.kind:
            case "lognormal":
                over = math.exp(self.sigma * _NORMAL.inv_cdf(min(max(quantile, 1e-9), 1 - 1e-9)))
            case "tail":
                over = _between(LONG_TAIL, quantile)
            case "constant":
                over = 1.0
            case _:
                raise ScenarioError(f"[lengths] kind is lognormal, tail or constant, not {self.kind!r}")
        return max(1, min(round(self.median * over * (1 + self.growth) ** batch), self.longest))


@dataclass(frozen=True, slots=True)
class Turns:
    """The number of turns of an episode, and the seconds of its tools."""

    mean: float = 1.0
    """Geometric, at most `most`; 1: a single turn."""
    most: int = 1
    result: int = 200
    """Tokens that a tool adds to the prompt."""
    wait_s: float = 0.0
    """Median of a log-normal with sigma 1, at most 20 times that."""


class Stated:
    """Groups from stated distributions."""

    def __init__(
        self, seed: int, group: int, batch: int, lengths: Lengths, turns: Turns, prompt: int, likeness: float
    ) -> None:
        self._seed, self._group, self._batch = seed, group, batch
        self._lengths, self._turns = lengths, turns
        self._prompt, self._likeness = prompt, likeness

    @property
    def longest(self) -> int:
        """Tokens of the longest context that there can be."""
        return self._prompt + self._turns.most * (self._lengths.longest + self._turns.result)

    def task(self, number: int) -> Task:
        """Return the group of that number."""
        draws = np.random.default_rng((self._seed, number))
        hard = float(draws.standard_normal())
        own = draws.standard_normal((self._group, self._turns.most))
        scores = math.sqrt(self._likeness) * hard + math.sqrt(1 - self._likeness) * own
        stops = draws.random((self._group, self._turns.most))
        waits = (
            np.exp(np.minimum(draws.standard_normal((self._group, self._turns.most)), 3.0))
            * self._turns.wait_s
        )
        return Task(tuple(self._episode(number, *row) for row in zip(scores, stops, waits, strict=True)))

    def _episode(
        self, number: int, scores: np.ndarray, stops: np.ndarray, waits: np.ndarray
    ) -> tuple[Turn, ...]:
        turns: list[Turn] = []
        last = 1 / self._turns.mean
        for score, stop, wait in zip(scores, stops, waits, strict=True):
            length = self._lengths.at(_NORMAL.cdf(float(score)), number / self._batch)
            ends = len(turns) == self._turns.most - 1 or stop < last
            turns.append(
                Turn(self._turns.result if turns else self._prompt, length, 0.0 if ends else float(wait))
            )
            if ends:
                break
        return tuple(turns)


class Recorded:
    """Recorded groups in their order, over and over; `seed` determines the first."""

    def __init__(self, tasks: Sequence[Task], seed: int = 0) -> None:
        if not tasks:
            raise ScenarioError("a recorded workload without a group")
        self._tasks, self._first = tasks, (seed * 7919) % len(tasks)

    @property
    def longest(self) -> int:
        """Tokens of the longest context that there can be."""
        return max(
            sum(t.prompt + t.sampled for t in turns) for task in self._tasks for turns in task.episodes
        )

    def task(self, number: int) -> Task:
        """Return the group of that number."""
        return self._tasks[(self._first + number) % len(self._tasks)]


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    """Interpolate log-linearly between points of rising quantiles."""
    i = min(max(bisect_right(points, (at, math.inf)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    share = (at - x0) / (x1 - x0)
    return math.exp(math.log(y0) + share * (math.log(y1) - math.log(y0)))
