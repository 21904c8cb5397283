"""gymnasium's environments through one tool: the model acts by calls of `act`, and reads what it sees in the responses.

`gym:FrozenLake-v1`. Discrete actions are an enumeration, by name (`actions`) or number; any other action space is a list of
numbers. Each task is a seed. The rewards of the environment's steps are those of the calls that made them. Arguments:
- `make`: those of `gymnasium.make`, such as `{"is_slippery": false}`;
- `actions`: names of the actions, in the environment's order;
- `observe`: `module:function(environment, observation) -> str`; without it the environment's own text (`render_mode`
  `ansi`), if it has one, or the observation as JSON;
- `instructions`, `size` (how many seeds), `max_steps` and `max_tokens` (of one turn).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Discrete

from headgate.environments.base import Found, Played
from headgate.environments.chat import Chat, ContextFull

_INSTRUCTIONS = "Act in this environment by calling the tool `act`, one action at a time, until it is over."


class GymEnvironment:
    """`gymnasium.make(name)`, created for each episode."""

    def __init__(
        self,
        name: str,
        make: dict[str, Any] | None = None,
        actions: Sequence[str] = (),
        observe: str = "",
        instructions: str = _INSTRUCTIONS,
        size: int = 256,
        max_steps: int = 32,
        max_tokens: int = 256,
    ) -> None:
        self._name, self._make = name, dict(make or {})
        modes = gymnasium.spec(name).make(**self._make).metadata.get("render_modes") or ()
        if not observe and "ansi" in modes:
            self._make.setdefault("render_mode", "ansi")
        self._observe = _function(observe) if observe else None
        self._actions = [*actions]
        self._instructions = instructions
        self._size, self._max_steps, self._max_tokens = size, max_steps, max_tokens
        self._chat = Chat()

    def tasks(self) -> Iterator[Found]:
        for seed in range(self._size):
            yield Found(str(seed), {"seed": seed})

    async def open(self) -> None:
        await self._chat.open()

    async def play(self, data: dict[str, Any], base_url: str, api_key: str) -> Played:
        game: Any = gymnasium.make(self._name, **self._make)
        try:
            return await self._play(game, data["seed"], base_url, api_key)
        finally:
            game.close()

    async def _play(self, game: Any, seed: int, base_url: str, api_key: str) -> Played:
        observation, _ = game.reset(seed=seed)
        tool = self._tool(game)
        messages: list[Any] = [
            {"role": "system", "content": self._instructions},
            {"role": "user", "content": self._text(game, observation)},
        ]
        calls: dict[str, float] = {}
        over, steps = False, 0
        while not over and steps < self._max_steps:
            try:
                reply = await self._chat.complete(
                    base_url, api_key, messages=messages, tools=[tool], max_tokens=self._max_tokens
                )
            except ContextFull:
                break
            message = reply["choices"][0]["message"]
            if not message.get("tool_calls"):
                break
            messages.append({key: value for key, value in message.items() if value is not None})
            calls[reply["id"]] = 0.0
            for call in message["tool_calls"]:
                result, reward, over = (
                    ("it is over", 0.0, True) if over else self._act(game, call["function"])
                )
                calls[reply["id"]] += reward
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            steps += 1
        return Played(sum(calls.values()), {"steps": float(steps)}, calls)

    def _act(self, game: Any, function: dict[str, Any]) -> tuple[str, float, bool]:
        """Play one action. Return what the model reads next, the reward, and whether the game is over. A call without an action
        changes nothing."""
        try:
            action = self._action(game, json.loads(function["arguments"])["action"])
        except (ValueError, KeyError, TypeError) as error:
            return f"error: {error}", 0.0, False
        observation, reward, terminated, truncated, _ = game.step(action)
        return self._text(game, observation), float(reward), bool(terminated or truncated)

    def _action(self, game: Any, value: Any) -> Any:
        space, action = game.action_space, value
        if not isinstance(space, Discrete):
            action = np.asarray(value, dtype=space.dtype)
        elif self._actions:
            if value not in self._actions:
                raise ValueError(f"an action is one of {', '.join(self._actions)}")
            action = space.start + self._actions.index(value)
        else:
            action = int(value)
        if not space.contains(action):
            raise ValueError(f"an action is in {space}")
        return action

    def _tool(self, game: Any) -> dict[str, Any]:
        space = game.action_space
        if isinstance(space, Discrete):
            numbers = [int(space.start + i) for i in range(int(space.n))]
            action: dict[str, Any] = {"type": "integer", "enum": numbers}
            if self._actions:
                action = {"type": "string", "enum": self._actions}
        else:
            action = {"type": "array", "items": {"type": "number"}, "description": str(space)}
        parameters = {"type": "object", "properties": {"action": action}, "required": ["action"]}
        function = {"name": "act", "description": "Take one action.", "parameters": parameters}
        return {"type": "function", "function": function}

    def _text(self, game: Any, observation: Any) -> str:
        if self._observe is not None:
            return str(self._observe(game, observation))
        if self._make.get("render_mode") == "ansi":
            return str(game.render())
        return json.dumps(observation, default=lambda value: value.tolist())

    async def close(self) -> None:
        await self._chat.close()


def _function(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
