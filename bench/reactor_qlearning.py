"""Synchronous parallel Q-learning on Blackjack: 16 actors play 100 steps each with the newest network, a learner trains it on
what they saw, and so on. A network 3-32-2 in numpy, Adam 0.01, discount 0.99, epsilon 0.1, a target copy every 10 rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bench.reactor_process import Place, Remote
from bench.reactor_sides import CPUS, Headgate, Hub, Ring, Side, Small
from scheduler.reactor import Context, Reactor

ACTORS, STEPS = 16, 100
_WIDTH, _RATE, _DISCOUNT, _EPSILON, _COPY, _KEPT = 32, 0.01, 0.99, 0.1, 10, 50_000
_PARTS = ((3, _WIDTH), (_WIDTH,), (_WIDTH, 2), (2,))
_SIZE = sum(int(np.prod(part)) for part in _PARTS)


def _unpacked(flat: np.ndarray) -> list[np.ndarray]:
    """Views of the flat parameters: first weights and bias, second weights and bias."""
    parts, at = [], 0
    for shape in _PARTS:
        size = int(np.prod(shape))
        parts.append(flat[at : at + size].reshape(shape))
        at += size
    return parts


class Rollout:
    """One actor's environment."""

    def __init__(self, index: int, steps: int = STEPS) -> None:
        import gymnasium

        self._gym = gymnasium.make("Blackjack-v1")
        self._observation, _ = self._gym.reset(seed=index)
        self._random, self._steps = np.random.default_rng(1000 + index), steps

    def play(self, flat: np.ndarray) -> np.ndarray:
        """float32 (steps, 9): observation, action, reward, next observation, whether the episode ended."""
        first, bias, second, out = _unpacked(flat)
        rows = np.empty((self._steps, 9), np.float32)
        chances, picks = self._random.random(self._steps), self._random.integers(0, 2, self._steps)
        for row, chance, pick in zip(rows, chances.tolist(), picks.tolist(), strict=True):
            seen = self._observation
            if chance < _EPSILON:
                action = pick
            else:
                hidden = np.maximum(np.array(seen, np.float32) @ first + bias, 0.0)
                action = int(np.argmax(hidden @ second + out))
            following, reward, ended, cut, _ = self._gym.step(action)
            row[:] = (*seen, action, reward, *following, ended)
            self._observation = self._gym.reset()[0] if ended or cut else following
        return rows


class Learner:
    """The replay buffer, the network and its optimizer."""

    def __init__(self, minibatch: int) -> None:
        self._random, self._minibatch = np.random.default_rng(3), minibatch
        self._flat = (self._random.standard_normal(_SIZE) * 0.3).astype(np.float32)
        self._target = self._flat.copy()
        self._moments = np.zeros((2, _SIZE), np.float32)
        self._seen = np.zeros((_KEPT, 9), np.float32)
        self._filled = self._rounds = 0
        self._reward = 0.0

    def begin(self) -> np.ndarray:
        """The parameters, float32; they are not changed afterwards."""
        return self._flat

    def end(self, rollouts: list[np.ndarray]) -> None:
        """One step on a minibatch, after the new rows are in the buffer."""
        for rows in rollouts:
            where = (self._filled + np.arange(len(rows))) % _KEPT
            self._seen[where] = rows
            self._filled += len(rows)
            self._reward += float(rows[:, 4].sum())
        picked = self._random.integers(0, min(self._filled, _KEPT), self._minibatch)
        self._step(self._seen[picked])
        self._rounds += 1
        if self._rounds % _COPY == 0:
            self._target = self._flat

    def result(self) -> tuple[float, str]:
        """Sum of rewards, and the parameters bit for bit."""
        return self._reward, self._flat.tobytes().hex()

    def _step(self, rows: np.ndarray) -> None:
        first, bias, second, out = _unpacked(self._flat)
        now, action, following = rows[:, :3], rows[:, 3].astype(np.int64), rows[:, 5:8]
        hidden = np.maximum(now @ first + bias, 0.0)
        one, two, three, four = _unpacked(self._target)
        best = (np.maximum(following @ one + two, 0.0) @ three + four).max(axis=1)
        wanted = rows[:, 4] + _DISCOUNT * best * (1.0 - rows[:, 8])
        index = np.arange(len(rows))
        error = np.zeros((len(rows), 2), np.float32)
        error[index, action] = 2.0 * ((hidden @ second + out)[index, action] - wanted) / len(rows)
        back = (error @ second.T) * (hidden > 0)
        parts = (now.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0))
        self._adam(np.concatenate([part.ravel() for part in parts]))

    def _adam(self, gradient: np.ndarray) -> None:
        count = self._rounds + 1
        self._moments[0] = 0.9 * self._moments[0] + 0.1 * gradient
        self._moments[1] = 0.999 * self._moments[1] + 0.001 * gradient**2
        mean, square = self._moments[0] / (1 - 0.9**count), self._moments[1] / (1 - 0.999**count)
        self._flat = (self._flat - _RATE * mean / (np.sqrt(square) + 1e-8)).astype(np.float32)


class _Actor(Reactor):
    def __init__(self, index: int, steps: int, place: Place) -> None:
        super().__init__(f"actor{index}")
        self._rollout = Remote(place, Rollout, index, steps)
        self.heard = self.input("heard", Small)
        self.answer = self.output("answer", Small)
        self.playing = self.reaction(self._play, on=[self.heard], writes=[self.answer])

    def _play(self, now: Context) -> None:
        now.set(self.answer, Small.of(self._rollout.call("play", now[self.heard].array)))


class _Headgate(Headgate):
    """The program, and the processes in which its actors step their environments: as many as there are cores."""

    def __init__(self, minibatch: int, actors: int, steps: int) -> None:
        self._places = [Place(__name__) for _ in range(CPUS)]
        made = [_Actor(index, steps, self._places[index % CPUS]) for index in range(actors)]
        hub = Hub(Learner(minibatch), actors, Small, Small, tuple[float, str])
        parallel = [actor.playing for actor in made]
        super().__init__(Ring("qlearning", hub, made), hub, workers=actors - 1, parallel=parallel)

    def close(self) -> None:
        super().close()
        for place in self._places:
            place.close()


class _Loop:
    """A bare loop."""

    def __init__(self, actors: int, steps: int, minibatch: int) -> None:
        self._learner = Learner(minibatch)
        self._rollouts = [Rollout(index, steps) for index in range(actors)]

    def play(self, rounds: int) -> Any:
        for _ in range(rounds):
            flat = self._learner.begin()
            self._learner.end([rollout.play(flat) for rollout in self._rollouts])
        return self._learner.result()

    def close(self) -> None:
        pass


class _Ray:
    def __init__(self, actors: int, steps: int, minibatch: int) -> None:
        import ray

        self._ray, self._learner = ray, Learner(minibatch)
        self._actors = [ray.remote(Rollout).remote(index, steps) for index in range(actors)]

    def play(self, rounds: int) -> Any:
        ray = self._ray
        for _ in range(rounds):
            flat = ray.put(self._learner.begin())
            self._learner.end(ray.get([actor.play.remote(flat) for actor in self._actors]))
        return self._learner.result()

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)


def sides(
    minibatch: int, ray: bool, actors: int = ACTORS, steps: int = STEPS
) -> dict[str, Callable[[], Side]]:
    """The sides for one size of the minibatch."""

    made: dict[str, Callable[[], Side]] = {
        "headgate": lambda: _Headgate(minibatch, actors, steps),
        "floor": lambda: _Loop(actors, steps, minibatch),
    }
    if ray:
        made["ray"] = lambda: _Ray(actors, steps, minibatch)
    return made
