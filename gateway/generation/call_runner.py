"""Runs a call in engines until it is complete, across weight updates, moves and failed engines.

One task per call reads the engine at the engine's pace and calls a listener for new tokens. Clients read the listener's output at
their own pace, so a slow client never delays a weight update; its unread output is bounded by the call's `max_tokens`. After an
abort or an engine's death the call continues from its last token, so nothing is sampled twice.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from gateway.engines.base import GenerateRequest, LoadImage, TokenChunk, no_images
from gateway.generation.call import Call
from gateway.generation.log_format import LoggedCall
from gateway.generation.pool import EnginePool
from gateway.generation.slot import Slot
from gateway.generation.span_attributes import ENGINE, WAIT, engine_facts
from gateway.telemetry.base import NO_TRACE, CallTrace
from headgate.errors import EngineError, EngineRefused, EngineReplaced, EngineUnreachable, GatewayError
from headgate.types import Grammar

log = logging.getLogger(__name__)
MAX_FAILURES = 5
"""Failures of engines after which a call fails: the call itself may be what makes engines fail."""

_ACCOUNT_S = 5.0
"""Seconds that a stopped call waits for its engine's labels of versions."""


def _no_listener() -> None:
    """Do nothing."""


class CallRunner:
    """Generates one call's tokens. Owns the task that does it."""

    def __init__(
        self,
        call: Call,
        pool: EnginePool,
        *,
        interval: int = 1,
        trace: CallTrace = NO_TRACE,
        load_image: LoadImage = no_images,
    ) -> None:
        """`interval`: tokens per chunk. `load_image`: finds the file of an image of the prompt."""
        self._load_image = load_image
        self.call = call
        self.trace = trace
        self._pool = pool
        self._interval = interval
        self._listener: Callable[[], None] = _no_listener
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._ending = False
        """True once no more tokens are needed, so that failures are ignored."""
        self._stopped_by: GatewayError | None = None

    def resume(self, logged: LoggedCall) -> None:
        """Continue the call of another process. Call this before `start`."""
        self.call = self.call.resumed(logged)

    def start(self, listener: Callable[[], None]) -> None:
        """Start to generate; after a `stop`, continue from the last token. `listener` is called for new tokens and restarts."""
        self._ending, self._stopped_by, self._listener = False, None, listener
        self._ended.clear()
        self._task = task = asyncio.create_task(self._generate(), name=f"call-{self.call.call_id}")

        def ended(_: asyncio.Task[None]) -> None:
            if self._task is task:
                self._ended.set()

        task.add_done_callback(ended)

    def detach(self) -> None:
        """Remove the listener."""
        self._listener = _no_listener

    def finish_early(self) -> None:
        """End `wait`, because the listener needs no more tokens. The call is not retried; its run continues until `stop`."""
        self._ending = True
        self._ended.set()

    async def wait(self) -> None:
        """Wait until the call is complete, or `finish_early`. Raise the error that ended the call."""
        assert self._task is not None
        await self._ended.wait()
        if self._task.done():
            if self._stopped_by is not None:
                raise self._stopped_by
            if not self._task.cancelled():
                self._task.result()

    async def stop(self, reason: GatewayError | None = None) -> None:
        """Stop the call wherever it is, in its engine too. Idempotent. `wait` raises `reason`."""
        task = self._task
        if task is None or task.done():
            return
        self._stopped_by = reason
        turn = self.call.turn
        if turn.routes is not None or turn.weights_have_changed or self._weights_may_change():
            await self._await_last_chunk(task)
        task.cancel()  # not `self._task`: the call may have been restarted since
        await asyncio.wait({task})

    async def _generate(self) -> None:
        failures = 0
        with self._pool.registered(self.call):
            while self.call.finish is None and not self._ending:
                with self.trace.step(WAIT) as step:
                    slot = await self._pool.acquire(self.call)
                    step.note(partial(engine_facts, slot))
                version = slot.version
                try:
                    try:
                        with self.trace.step(ENGINE, remote=True) as step:
                            step.note(partial(engine_facts, slot))
                            await self._run(slot)
                    finally:
                        self._pool.release(self.call)
                    if self.call.finish is None and not self._ending:
                        await self._pool.wait_for_turn()
                except EngineError as error:
                    failures += 1
                    self._engine_failed(slot, version, error, failures)
                    if failures > 1:
                        await asyncio.sleep(0.1 * 2 ** min(failures - 2, 4))

    async def _run(self, slot: Slot) -> None:
        """Run the call in one engine until it is complete or the engine gives it back."""
        call = self.call
        await slot.run(call, self._request(slot), self._on_chunk)
        if call.turn.disputed and slot.external_url is not None:
            self._pool.report_disputed(slot, f"it reports that it does not run version {slot.version}")
        self._pool.remember(call, slot)
        if slot.state == "held" and not call.hints.preferred:
            call.prefer(slot.name)
        call.check_length()
        if call.finish is None and call.pinned and not self._ending:
            raise EngineError(f"{slot.name} gave a call with {call.pinned} back")

    def _request(self, slot: Slot) -> GenerateRequest:
        """Return the request for the missing tokens."""
        call, sampling = self.call, self.call.sampling
        sampled = len(call.turn.ids)
        if sampled or call.alternatives != sampling.top_logprobs:
            left = sampling.max_tokens - sampled
            sampling = replace(sampling, max_tokens=left, top_logprobs=call.alternatives)
        return GenerateRequest(
            f"{call.call_id}.{call.restarts}.{sampled}",
            call.tokens(),
            sampling,
            self._interval,
            cache_salt=f"v{slot.version}",
            label=slot.label if slot.external_url is not None else "",
            images=call.images,
            load_image=self._load_image,
            routes_from=None if call.turn.routes is None else call.turn.routes.next,
        )

    def _on_chunk(self, chunk: TokenChunk, now: float) -> None:
        """Receive a chunk from the engine. `now`: the loop's clock."""
        if chunk.ids:
            self._pool.pace.count(len(chunk.ids), now)
        self.call.append_chunk(chunk)
        if chunk.ids:
            self._listener()
        if chunk.routes is not None and (routes := self.call.turn.routes) is not None and routes.impossible:
            log.error("call %s: %s reports experts that the model cannot have chosen", *self._names())
        if chunk.finish is not None and self.call.turn.disputed:
            log.error("call %s: %s reports %s, which contradicts what arrived", *self._names(), chunk.labels)

    def _engine_failed(self, slot: Slot, version: int, error: EngineError, failures: int) -> None:
        """Prepare another attempt after an engine failed. Raise if the call cannot continue."""
        call = self.call
        log.warning("call %s: %s failed after %d tokens: %s", *self._names(), len(call.turn.ids), error)
        if isinstance(error, EngineUnreachable):
            self._pool.report_unreachable(slot)
        if isinstance(error, EngineReplaced) and slot.state == "open" and version == slot.version:
            self._pool.report_disputed(slot, error.message)
        if self._ending:
            return
        if isinstance(error, EngineRefused):
            _name_field(error, call.sampling.grammar)
        if isinstance(error, EngineRefused) or failures >= MAX_FAILURES:
            raise error
        call.avoid_engine(slot.name)
        if call.pinned and call.turn.ids:
            self._start_over(error)

    def _start_over(self, error: EngineError) -> None:
        """Restart a pinned call, whose sampler's state is lost, from its prompt. Raise EngineError if part of its reply was
        delivered."""
        call = self.call
        if call.delivered:
            message = (
                f"the engine of a call with {call.pinned} died, and part of its reply was delivered"
                f" ({error.message})"
            )
            raise EngineError(message, code="call_lost") from error
        call.start_over()
        self._listener()

    def _weights_may_change(self) -> bool:
        """Return true if the call's engine is about to get new weights, or may have got them unnoticed."""
        run = self._pool.run_of(self.call)
        return run is not None and run.slot.state == "held" and run.slot.settled

    async def _await_last_chunk(self, task: asyncio.Task[None]) -> None:
        """Abort the run and wait for the engine's last chunk, which alone shows the tokens that were sampled before the weights
        changed, and the experts of all."""
        run = self._pool.run_of(self.call)
        if run is None or run.slot.engine is None:
            return
        self._ending = True
        try:
            await run.slot.engine.abort([run.request_id])
        except EngineError:
            return
        await asyncio.wait({task}, timeout=_ACCOUNT_S)

    def _names(self) -> tuple[str, str]:
        return self.call.call_id, self.call.turn.engine


_OF_A_GRAMMAR = re.compile("grammar|schema|regex|structural", re.IGNORECASE)


def _name_field(error: EngineRefused, grammar: Grammar | None) -> None:
    """Name the field of the request that an engine's refusal is about, if its text names the grammar."""
    if grammar is not None and error.param is None and _OF_A_GRAMMAR.search(error.message):
        error.param, error.code = grammar.param, "invalid_schema"
        error.message = f"{grammar.param}: {error.message}"
