"""A fake engine whose steps and prefills take as long as those of a measured engine, times a factor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.engines.fake import FakeEngine
from gateway.engines.fake.prefix_cache import CACHE_BLOCK
from gateway.engines.fake.requests import RunningRequest
from scheduler.policies.throughput import EngineModel


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a step, and of a token of a prompt that is not cached. A prefill holds up the engine's other requests."""

    step: EngineModel
    prefill_s: float

    def times(self, factor: float) -> Costs:
        """Return the costs of an engine that is slower by `factor`."""
        return Costs(self.step.times(factor), self.prefill_s * factor)


class TimedEngine(FakeEngine):
    """Counts the tokens that it prefilled, and those of them that it prefilled because a call was retried or moved."""

    def __init__(self, weights: str, costs: Costs) -> None:
        super().__init__(weights)
        self.costs = costs
        self.prefilled = self.recomputed = 0
        self._resumes = False
        self._prefills_until = 0.0

    async def generate(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        sampled: list[int] = []
        # An id ends with the tokens that the call has; nothing is awaited between here and `_look_up`
        self._resumes = not str(body.get("request_id", "")).endswith(".0")
        async for choice in super().generate(body):
            sampled += choice["token_ids"]
            yield choice
        if not self.paused:
            self._cache_tokens([*body["token_ids"], *sampled], body.get("cache_salt", ""))

    def _look_up(self, prompt: Sequence[int], salt: str) -> None:
        missing = len(prompt) - CACHE_BLOCK * self.cache.look_up(prompt, salt, self.weights_id)
        self.prefilled += missing
        self.recomputed += missing if self._resumes else 0
        now = asyncio.get_running_loop().time()
        self._prefills_until = max(now, self._prefills_until) + missing * self.costs.prefill_s

    def _cache_tokens(self, tokens: Sequence[int], salt: str) -> None:
        """Cache the tokens of a call that has ended, as vLLM does."""
        before = self.cache.hits, self.cache.stale_hits
        self.cache.look_up(tokens, salt, self.weights_id)
        self.cache.hits, self.cache.stale_hits = before

    async def _turn(self, request: RunningRequest) -> None:
        now = asyncio.get_running_loop().time()
        running, _, kv = self.figures
        await asyncio.sleep(max(now, self._prefills_until) - now + self.costs.step.step_s(running, kv))
        await super()._turn(request)
