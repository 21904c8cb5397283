"""One call's life behind the API: generating, aborted, continued, until it is whole.

A call owns the tokens that were sampled for it. A task of its own reads the engine at the engine's pace and tells a listener of
what has come, at once and in the same task: a token wakes nobody else. Clients read what the listener makes of it at a pace of
their own, so a slow one never holds up a weight update; what it has not read yet is at most the call's `max_tokens`.

Invariants:
- the turn only grows, except that a pinned call whose engine died is begun anew, and only while nothing of it was delivered;
- which version sampled a token is the turn's business (`trajectories.turn`), from what the slot says at its arrival;
- after an abort or an engine's death the call goes on from its last token: nothing is sampled twice.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from gateway.engines.base import GenerateRequest, TokenChunk
from gateway.errors import EngineError, EngineRefused, EngineReplaced, EngineUnreachable, GatewayError
from gateway.rollout.pool import EnginePool
from gateway.rollout.slot import Run, Slot
from gateway.trajectories.turn import Turn
from gateway.types import FinishReason, Int32Array, Sampling

log = logging.getLogger(__name__)

_ACCOUNT_S = 5.0
"""The time that a stopped call waits for its engine's account of versions."""


def _nobody() -> None:
    """Stands where a listener will be."""


class Call:
    """A prompt and what was sampled after it."""

    def __init__(
        self,
        call_id: str,
        prompt: Int32Array,
        sampling: Sampling,
        pool: EnginePool,
        *,
        interval: int = 1,
        episode_id: str = "",
        version: int = 0,
        max_failures: int = 5,
    ) -> None:
        """`version`: no older one may sample it (its group's V)."""
        self.call_id = call_id
        self.episode_id = episode_id
        self.prompt = prompt
        self.sampling = sampling
        self.version = version
        self.expected = 0
        """Tokens that it will sample, as predicted; 0: nobody knows."""
        self.tail = False
        """True if the call is predicted to be one of the longest."""
        self.turn = Turn(call_id)
        self.run: Run | None = None
        """Its stay in an engine, while it is in one."""
        self.top: list[list[tuple[int, float]]] = []
        """The alternatives to each token, if they were asked for."""
        self.finish: FinishReason | None = None
        self.delivered = False
        """Something of the turn has left for a client."""
        self.restarts = 0
        """The number of times the call was begun anew."""
        self.target = ""
        """The engine that it shall go to, if that is open."""
        self.patient_until = 0.0
        """The time (by the loop's clock) until which the call waits for its target, if that is being updated."""
        self.avoid: set[str] = set()
        self._interval = interval
        self._pool = pool
        self._max_failures = max_failures
        self._listener: Callable[[], None] = _nobody
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._ending = False
        self._stopped_by: GatewayError | None = None

    @property
    def length(self) -> int:
        """Tokens of the prompt and of what was sampled so far."""
        return len(self.prompt) + len(self.turn.ids)

    @property
    def begun(self) -> bool:
        """True if the call has been in an engine; from then on it is not refused any more, only slow."""
        return self.turn.engine != ""

    def start(self, listener: Callable[[], None]) -> None:
        """Starts to generate; after a `stop`, goes on from the last token. `listener` hears of every growth and every restart."""
        self._ending, self._stopped_by, self._listener = False, None, listener
        self._over.clear()
        self._task = task = asyncio.create_task(self._generate(), name=f"call-{self.call_id}")

        def ended(_: asyncio.Task[None]) -> None:
            if self._task is task:
                self._over.set()

        task.add_done_callback(ended)

    def detach(self) -> None:
        """Nobody listens any more."""
        self._listener = _nobody

    def finish_early(self) -> None:
        """The listener needs no more tokens: `wait` returns, and the call is not begun anew; its run goes on until `stop`."""
        self._ending = True
        self._over.set()

    async def wait(self) -> None:
        """Waits until the call is over, or its listener has enough. Raises the error that ended the call."""
        assert self._task is not None
        await self._over.wait()
        if self._task.done():
            if self._stopped_by is not None:
                raise self._stopped_by
            if not self._task.cancelled():
                self._task.result()

    async def stop(self, reason: GatewayError | None = None) -> None:
        """Ends the call, wherever it is; the engine stops working on it. Idempotent. `reason` is raised from `grown`."""
        task = self._task
        if task is None or task.done():
            return
        self._stopped_by = reason
        if self.turn.crossed or self._in_held():
            await self._ask_for_account(task)
        task.cancel()  # not `self._task`: the call may have been restarted meanwhile
        await asyncio.wait({task})

    def take(self, chunk: TokenChunk, now: float) -> None:
        """Tokens have arrived from the engine, by the loop's clock at `now`."""
        if chunk.ids:
            self._pool.pace.count(len(chunk.ids), now)
            self.turn.append(chunk.ids, chunk.logprobs)
            if chunk.top is not None:
                self.top += chunk.top
            self._listener()
        if chunk.finish is None:
            return
        self.turn.end_run(chunk.labels)
        if self.turn.disputed:
            log.error("call %s: %s says %s, which contradicts what arrived", *self._who(), chunk.labels)
        if chunk.finish == "abort":
            self.turn.pauses += 1
        else:
            self.finish = chunk.finish

    async def _generate(self) -> None:
        failures = 0
        self._pool.calls[self.call_id] = self
        try:
            while self.finish is None and not self._ending:
                slot = await self._pool.acquire(self)
                version = slot.version
                try:
                    try:
                        await self._run(slot)
                    finally:
                        self._pool.release(self)
                    if self.finish is None and not self._ending:
                        await self._pool.turn()
                except EngineError as error:
                    failures += 1
                    self._lost(slot, version, error, failures)
                    if failures > 1:
                        await asyncio.sleep(0.1 * 2 ** min(failures - 2, 4))
        finally:
            self._pool.calls.pop(self.call_id, None)

    async def _run(self, slot: Slot) -> None:
        """One run in one engine: to the end of the call, or until the engine gives it back."""
        sampled = len(self.turn.ids)
        left = self.sampling.max_tokens - sampled
        self.turn.engine, self.target, self.avoid, self.patient_until = slot.name, "", set(), 0.0
        request = GenerateRequest(
            f"{self.call_id}.{self.restarts}.{sampled}",
            self._tokens(),
            replace(self.sampling, max_tokens=left) if sampled else self.sampling,
            self._interval,
            cache_salt=f"v{slot.version}",
            label=str(slot.version) if slot.external_url is not None else "",
        )
        await slot.run(self, request)
        if self.turn.disputed and slot.external_url is not None:
            self._pool.on_dispute(slot, f"it does not run version {slot.version}, by its own account")
        self._pool.remember(self, slot)
        if slot.state == "held" and not self.target:
            self.target = slot.name
            # Jitter, so that calls do not all give up at once
            patience_s = self._pool.patience_s * random.uniform(0.5, 1.5)
            self.patient_until = asyncio.get_running_loop().time() + patience_s
        if self.finish is None and len(self.turn.ids) >= self.sampling.max_tokens:
            self.finish = "length"
        if self.finish is None and self.sampling.pinned and not self._ending:
            raise EngineError(f"{slot.name} gave a call with {self.sampling.pinned} back")

    def _tokens(self) -> Int32Array:
        """The prompt and what was sampled so far."""
        if not self.turn.ids:
            return self.prompt
        return np.concatenate([self.prompt, np.asarray(self.turn.ids, np.int32)])

    def _lost(self, slot: Slot, version: int, error: EngineError, failures: int) -> None:
        """The engine failed the call. Raises if the call cannot go on."""
        log.warning("call %s: %s failed after %d tokens: %s", *self._who(), len(self.turn.ids), error)
        if isinstance(error, EngineUnreachable):
            self._pool.on_trouble(slot)
        if isinstance(error, EngineReplaced) and slot.state == "open" and version == slot.version:
            self._pool.on_dispute(slot, error.message)
        if self._ending:
            return
        if isinstance(error, EngineRefused) or failures >= self._max_failures:
            raise error
        self.avoid = {slot.name}
        if not self.sampling.pinned or not self.turn.ids:
            return
        if self.delivered:
            message = (
                f"the engine of a call with {self.sampling.pinned} died, and part of its reply was delivered"
                f" ({error.message})"
            )
            raise EngineError(message, code="call_lost") from error
        self.turn.restart()
        self.top.clear()
        self.restarts += 1
        self._listener()

    def _in_held(self) -> bool:
        """True if the call runs in an engine whose weights are about to change, or have changed without notice to this
        process."""
        slot = self.run.slot if self.run else None
        return slot is not None and slot.state == "held" and slot.settled

    async def _ask_for_account(self, task: asyncio.Task[None]) -> None:
        """The weights changed under the run: only the engine knows which of its tokens came before."""
        run = self.run
        if run is None or run.slot.engine is None:
            return
        self._ending = True
        try:
            await run.slot.engine.abort([run.request_id])
        except EngineError:
            return
        await asyncio.wait({task}, timeout=_ACCOUNT_S)

    def _who(self) -> tuple[str, str]:
        return self.call_id, self.turn.engine
