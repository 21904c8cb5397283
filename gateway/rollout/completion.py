"""One reply in the making, from a prompt to a committed turn.

A task of its own makes the reply; clients read it (`reply.Reader`) and may come and go. Invariants (design, R2, R3 and R5):
- the tokens whose text is delivered are the tokens that are recorded, once each and in order;
- the last pieces of a reply are seen only after its turn is committed, and it is committed only while somebody reads;
- while nobody reads, no engine works; a reader who comes within the grace period gets the rest from the last token on (but not
  of a seeded call: the sampler's state was lost with its run);
- otherwise, and when the call fails or is stopped, what was sampled is recorded as an abandoned branch, which is never trained.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from gateway.errors import GatewayError
from gateway.metrics import Metrics
from gateway.render.renderer import Message
from gateway.render.segmenter import Piece, Segmenter
from gateway.rollout.call import Call
from gateway.rollout.reply import Reply
from gateway.trajectories.recorder import Prompt, Recorder, TurnDetails
from gateway.types import Int32Array

log = logging.getLogger(__name__)

Segment = Callable[[Int32Array], Segmenter]
"""Makes a new segmenter for what follows a prompt."""


def _nothing(_tokens: int) -> None:
    """What is charged where nothing is limited."""


class _Deserted(GatewayError):
    """Nobody reads the reply."""


class Completion:
    """Start it, read its `reply`, or `stop` it."""

    def __init__(
        self,
        episode_id: str,
        call: Call,
        prompt: Prompt,
        details: TurnDetails,
        segment: Segment,
        *,
        recorder: Recorder,
        metrics: Metrics,
        grace_s: float,
    ) -> None:
        self.details = details
        self.reply = Reply(call.call_id, details.received_at, len(prompt.ids))
        self.reply.deserted = self._stop_engine
        self.charge: Callable[[int], None] = _nothing
        """Called once, with the tokens that the reply took: of the prompt, and sampled."""
        self._episode_id = episode_id
        self._call = call
        self._prompt = prompt
        self._segment = segment
        self._segmenter = segment(prompt.ids)
        self._recorder = recorder
        self._metrics = metrics
        self._grace_s = grace_s
        self._restarts = call.restarts
        self._pieces: list[Piece] = []
        """Taken, and not yet part of a delivery."""
        self._delivered = 0
        self._whole = False
        """Everything was sampled."""
        self._given_up = False
        self._stopped_by: GatewayError | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """Begins to make the reply. The task lives until a client has all of it, or nobody will get it any more."""
        self._task = asyncio.create_task(self._live(), name=f"reply-{self.reply.call_id}")
        return self._task

    async def stop(self, reason: GatewayError) -> None:
        """Ends it now, read or not; when this returns, what was sampled is recorded. Readers get `reason` raised."""
        self._stopped_by = self._stopped_by or reason
        self.reply.move()
        await self._call.stop(reason)
        if self._task is not None:
            await asyncio.wait({self._task})

    @property
    def joinable(self) -> bool:
        """Whether a new reader would get the reply."""
        return not self._given_up and self._stopped_by is None and self.reply.failure is None

    async def _live(self) -> None:
        try:
            try:
                while not (self._whole and self.reply.readers):
                    await self._wait_for_a_reader()
                    await self._generate()
            except Exception:
                await self._abandon()
                raise
            await self._commit()
        except Exception as error:
            if not isinstance(error, GatewayError):
                log.exception("call %s failed", self.reply.call_id)
            self.reply.end(error)
        else:
            await self._linger()
        finally:
            self._part()

    def _part(self) -> None:
        """Lets go of what refers back here: replies are many, and should not wait for the garbage collector."""
        self.reply.deserted = None
        self._call.part()
        self.charge(len(self._prompt.ids) + len(self._call.turn.ids))

    async def _wait_for_a_reader(self) -> None:
        """Raises what ended the waiting: the end of the grace period, or `stop`."""
        try:
            async with asyncio.timeout(0 if self._given_up else self._grace_s):
                while self._stopped_by is None and not self.reply.readers:
                    await self.reply.moved()
        except TimeoutError:
            if not self.reply.readers:
                raise _Deserted("the client went away and did not come back") from None
        if self._stopped_by is not None:
            raise self._stopped_by

    async def _generate(self) -> None:
        """Until everything was sampled, or nobody reads any more."""
        if self._whole:
            return
        self._call.start(self._take)
        try:
            await self._call.wait()
        except _Deserted:
            return
        if self._segmenter.stopped:
            await self._call.stop()
            self._call.turn.truncate(self._segmenter.consumed)
            self._call.finish = "stop"
        self._whole = self._call.finish is not None

    def _take(self) -> None:
        """New tokens become pieces, and, in a stream, a delivery; what a stop string ends is kept for the last one.

        Called for every chunk of tokens, by the call's own task.
        """
        if self._segmenter.stopped:
            return
        if self._call.restarts != self._restarts:
            self._restarts = self._call.restarts
            self._segmenter, self._pieces = self._segment(self._prompt.ids), []
        ids = self._call.turn.ids
        if ids and self.details.first_token_s is None:
            self.details.first_token_s = time.time() - self.details.received_at
        self._pieces += self._segmenter.push(ids[self._segmenter.consumed :])
        if self._segmenter.stopped:
            self._call.enough()
        elif self._pieces and self.details.stream:
            self._call.delivered = True
            self._deliver()

    def _deliver(self) -> None:
        self.reply.deliver(self.reply.compose(self._pieces, *self._tokens()))
        self._pieces = []

    def _tokens(self) -> tuple[Sequence[int], Sequence[float], Sequence[Sequence[tuple[int, float]]] | None]:
        """What was taken since the last delivery."""
        turn, start, end = self._call.turn, self._delivered, self._segmenter.consumed
        self._delivered = end
        return turn.ids[start:end], turn.logprobs[start:end], self._call.top[start:end] or None

    async def _commit(self) -> None:
        """Records the turn, and then delivers the rest."""
        last = self.reply.compose([*self._pieces, *self._segmenter.finish()], *self._tokens())
        finish = self._call.finish or "stop"
        self.details.finish_reason = "tool_calls" if finish == "stop" and self.reply.tool_calls else finish
        await self._record(self.reply.message())
        self._metrics.seconds.observe(time.time() - self.details.received_at)
        self.reply.matched_stop = self._segmenter.matched_stop
        self.reply.deliver(last)
        self.reply.end(self.details.finish_reason)

    async def _abandon(self) -> None:
        self._given_up = True
        await self._call.stop()
        self.details.finish_reason = self.details.mask_reason = "abandoned"
        try:
            await self._record(None)
        except Exception:
            log.exception("what was sampled for call %s could not be recorded", self.reply.call_id)

    async def _record(self, message: Message | None) -> None:
        """What was sampled; an abandoned call that sampled nothing leaves no trace but in the metrics."""
        turn, details = self._call.turn, self.details
        if message is not None or turn.ids:
            await self._recorder.record(self._episode_id, self._prompt, turn, details, message)
        self._metrics.calls.labels(details.api, details.finish_reason).inc()
        self._metrics.prompt_tokens.inc(len(self._prompt.ids))
        self._metrics.sampled_tokens.inc(len(turn.ids))
        if details.first_token_s is not None:
            self._metrics.first_token.observe(details.first_token_s)

    async def _linger(self) -> None:
        """Until a client has the whole reply, or none came back for it within the grace period."""
        reply = self.reply
        while self._stopped_by is None and not reply.delivered:
            try:
                async with asyncio.timeout(None if reply.readers else self._grace_s):
                    await reply.moved()
            except TimeoutError:
                if not reply.readers:
                    return

    async def _stop_engine(self) -> None:
        """The last reader has left: the engine stops at once, and the tokens are kept if they can be continued."""
        self._given_up = bool(self._call.sampling.pinned) and not self._whole
        await self._call.stop(_Deserted("nobody reads the reply"))
