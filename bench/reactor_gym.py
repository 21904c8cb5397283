"""Sampling from Gym: 15 environments take a step each, with random actions; all answer before the next round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bench.reactor_sides import Headgate, Hub, Ring, Side, Small, opened
from scheduler.reactor import Context, Reactor

ENVIRONMENTS = 15
NAMES = ("CartPole-v1", "Blackjack-v1", "Pendulum-v1")
ATARI = ("ALE/MsPacman-v5", "ALE/Pong-v5", "ALE/SpaceInvaders-v5")
Step = tuple[Any, float, bool]
"""Observation, reward, whether the episode ended and a new one began."""


class Environment:
    """One environment of any side; `index` seeds it."""

    def __init__(self, name: str, index: int) -> None:
        import gymnasium

        if name.startswith("ALE/"):
            import ale_py

            gymnasium.register_envs(ale_py)
        self._gym = gymnasium.make(name)
        self._gym.reset(seed=index)
        self._box = hasattr(self._gym.action_space, "low")

    def step(self, action: int) -> Step:
        """`action` is 0 or 1, as in the paper; for a continuous one, its force."""
        given = np.array([action], np.float32) if self._box else action
        observation, reward, ended, cut, _ = self._gym.step(given)
        if ended or cut:
            observation, _ = self._gym.reset()
        return observation, float(reward), ended or cut


class _Tally:
    """The actions of every round, and what comes of them."""

    def __init__(self, count: int) -> None:
        self._random = np.random.default_rng(7)
        self._count = count
        self._actions: list[list[int]] = []
        self.steps: list[Step] = []
        self.reward = 0.0
        self.ends = 0

    def begin(self) -> tuple[int, ...]:
        """The actions of the next round."""
        if not self._actions:
            self._actions = self._random.integers(0, 2, (1024, self._count)).tolist()
        return tuple(self._actions.pop())

    def end(self, steps: list[Step]) -> None:
        """Takes a round."""
        self.steps = steps
        for _, reward, ended in steps:
            self.reward += reward
            self.ends += ended

    def result(self) -> tuple[float, int, str]:
        """Sum of rewards, episodes that ended, and the last observations bit for bit."""
        return self.reward, self.ends, str([np.asarray(step[0]).tobytes().hex()[:64] for step in self.steps])


class _Actor(Reactor):
    def __init__(self, name: str, index: int, observed: Any) -> None:
        super().__init__(f"actor{index}")
        self._index, self._environment = index, Environment(name, index)
        self._observed = observed
        step: Any = tuple[observed, float, bool]
        self.heard = self.input("heard", tuple[int, ...])
        self.answer = self.output("answer", step)
        self.reaction(self._step, on=[self.heard], writes=[self.answer])

    def _step(self, now: Context) -> None:
        observation, reward, ended = self._environment.step(now[self.heard][self._index])
        if self._observed is Small:
            observation = Small.of(observation)
        now.set(self.answer, (observation, reward, ended))


class _Hub(Hub):
    def opened(self, answer: Any) -> Step:
        observation, reward, ended = answer
        return opened(observation), reward, ended


class _Loop:
    """A bare loop: the floor."""

    def __init__(self, name: str, count: int) -> None:
        self._environments = [Environment(name, index) for index in range(count)]
        self._tally = _Tally(count)

    def play(self, rounds: int) -> Any:
        tally = self._tally
        for _ in range(rounds):
            actions = tally.begin()
            tally.end([env.step(action) for env, action in zip(self._environments, actions, strict=True)])
        return tally.result()

    def close(self) -> None:
        pass


class _Ray:
    def __init__(self, name: str, count: int) -> None:
        import ray

        self._ray, self._tally = ray, _Tally(count)
        self._actors = [ray.remote(Environment).remote(name, index) for index in range(count)]

    def play(self, rounds: int) -> Any:
        tally = self._tally
        for _ in range(rounds):
            pairs = zip(self._actors, tally.begin(), strict=True)
            tally.end(self._ray.get([actor.step.remote(action) for actor, action in pairs]))
        return tally.result()

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)


def sides(name: str, ray: bool, count: int = ENVIRONMENTS) -> dict[str, Callable[[], Side]]:
    """The sides for one kind of environment."""
    observed: Any = tuple[int, ...] if name.startswith("Blackjack") else Small

    def headgate() -> Side:
        step: Any = tuple[observed, float, bool]
        hub = _Hub(_Tally(count), count, tuple[int, ...], step, tuple[float, int, str])
        return Headgate(Ring("gym", hub, [_Actor(name, index, observed) for index in range(count)]), hub)

    made: dict[str, Callable[[], Side]] = {"headgate": headgate, "floor": lambda: _Loop(name, count)}
    if ray:
        made["ray"] = lambda: _Ray(name, count)
    return made
