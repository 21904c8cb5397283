"""Multi-agent inference: every agent sees something of its own, runs its own small network and says what to do; the world steps.

The paper's environment (TrafficJunction of ma_gym) needs gym 0.20 and an old cloudpickle, which do not install beside Ray.
`Junction` has its shapes: 14 x 14 cells, a view of 3 x 3 cells of (agents + 5) numbers each, two actions; agents run obs-64-2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bench.reactor_sides import Headgate, Hub, Ring, Side, Small
from scheduler.reactor import Context, Reactor

_GRID, _VIEW, _CAP = 14, 3, 40
_ROUTES = (
    [(_GRID // 2, column) for column in range(_GRID)],
    [(_GRID // 2 - 1, column) for column in reversed(range(_GRID))],
    [(row, _GRID // 2 - 1) for row in range(_GRID)],
    [(row, _GRID // 2) for row in reversed(range(_GRID))],
)
"""The cells of the four lanes, from where cars come in."""


class Junction:
    """Cars on two crossing roads; a car that is told 0 drives on if the next cell is free."""

    def __init__(self, agents: int) -> None:
        self.agents = agents
        self.width = _VIEW * _VIEW * (agents + 5)
        self._at = [0] * agents
        self._cars = np.zeros((agents, agents + 5), np.float32)
        self._cars[:, :agents] = np.eye(agents)
        self._field = np.zeros((_GRID + 2, _GRID + 2, agents + 5), np.float32)
        self._steps = 0
        for agent in range(agents):
            self._at[agent] = agent // 4 * 2
            self._cars[agent, agents + 2 + agent % 3] = 1.0
            self._show(agent)

    def step(self, actions: list[int]) -> float:
        """Moves the cars in order; answers the reward."""
        self._steps += 1
        reward = -0.01 * self.agents
        for agent, action in enumerate(actions):
            route, at = _ROUTES[agent % 4], self._at[agent]
            further = (at + 1) % _GRID
            row, column = route[further]
            if action or self._steps % _CAP == 0:
                continue
            if self._field[row + 1, column + 1].any():
                reward -= 10.0
                continue
            here = route[at]
            self._field[here[0] + 1, here[1] + 1] = 0.0
            self._at[agent] = further
            self._show(agent)
        return reward

    def observe(self) -> np.ndarray:
        """float32 (agents, width): what each of them sees around it."""
        seen = np.empty((self.agents, self.width), np.float32)
        for agent in range(self.agents):
            row, column = _ROUTES[agent % 4][self._at[agent]]
            seen[agent] = self._field[row : row + _VIEW, column : column + _VIEW].reshape(-1)
        return seen

    def _show(self, agent: int) -> None:
        row, column = _ROUTES[agent % 4][self._at[agent]]
        car = self._cars[agent]
        car[self.agents], car[self.agents + 1] = row / (_GRID - 1), column / (_GRID - 1)
        self._field[row + 1, column + 1] = car


class Agent:
    """A network of its own: width-64-2, the greater output is the action."""

    def __init__(self, index: int, width: int) -> None:
        random = np.random.default_rng(index)
        self._first = random.standard_normal((width, 64), np.float32)
        self._second = random.standard_normal((64, 2), np.float32)

    def act(self, seen: np.ndarray) -> int:
        """`seen`: float32 (width,)."""
        return int(np.argmax(np.maximum(seen @ self._first, 0.0) @ self._second))


class _World:
    """The environment, and what comes of it."""

    def __init__(self, agents: int) -> None:
        self._junction = Junction(agents)
        self._reward, self._acted = 0.0, 0

    def begin(self) -> np.ndarray:
        """Returns the state that every agent sees."""
        return self._junction.observe()

    def end(self, actions: list[int]) -> None:
        """Does it."""
        self._reward += self._junction.step(actions)
        self._acted = (self._acted * 31 + sum(action << n for n, action in enumerate(actions))) % (1 << 31)

    def result(self) -> tuple[float, int]:
        """Sum of rewards, and a checksum of all actions."""
        return self._reward, self._acted


class _Actor(Reactor):
    def __init__(self, index: int, width: int) -> None:
        super().__init__(f"agent{index}")
        self._index, self._agent = index, Agent(index, width)
        self.heard = self.input("heard", Small)
        self.answer = self.output("answer", int)
        self.reaction(self._act, on=[self.heard], writes=[self.answer])

    def _act(self, now: Context) -> None:
        now.set(self.answer, self._agent.act(now[self.heard].array[self._index]))


class _Loop:
    """A bare loop: the floor."""

    def __init__(self, agents: int) -> None:
        width = Junction(agents).width
        self._world, self._agents = _World(agents), [Agent(index, width) for index in range(agents)]

    def play(self, rounds: int) -> Any:
        world = self._world
        for _ in range(rounds):
            seen = world.begin()
            world.end([agent.act(row) for agent, row in zip(self._agents, seen, strict=True)])
        return world.result()

    def close(self) -> None:
        pass


class _Ray:
    def __init__(self, agents: int) -> None:
        import ray

        width = Junction(agents).width
        self._ray, self._world = ray, _World(agents)
        self._actors = [ray.remote(Agent).remote(index, width) for index in range(agents)]

    def play(self, rounds: int) -> Any:
        world = self._world
        for _ in range(rounds):
            pairs = zip(self._actors, world.begin(), strict=True)
            world.end(self._ray.get([actor.act.remote(row) for actor, row in pairs]))
        return world.result()

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)


def sides(agents: int, ray: bool) -> dict[str, Callable[[], Side]]:
    """The sides for so many agents."""

    def headgate() -> Side:
        hub = Hub(_World(agents), agents, Small, int, tuple[float, int])
        width = Junction(agents).width
        return Headgate(Ring("marl", hub, [_Actor(index, width) for index in range(agents)]), hub)

    made: dict[str, Callable[[], Side]] = {"headgate": headgate, "floor": lambda: _Loop(agents)}
    if ray:
        made["ray"] = lambda: _Ray(agents)
    return made
