"""Generates one reply, from a prompt to a committed turn.

One task generates the reply; clients (`reply.Reader`) may come and go. Invariants (docs/topics/guarantees.md, R2, R3 and R5):
- every delivered token is recorded, once and in order;
- the last pieces of a reply are delivered only after its turn is committed, and it is committed only while a client reads;
- while no client reads, no engine works. A client that returns within the grace period gets the reply from its beginning, and
  sampling continues from the last token (except for a seeded call, whose sampler's state is lost);
- otherwise, and if the call fails or is stopped, the sampled tokens are recorded as an abandoned branch, which is never trained;
- after another process has taken the call over, this one delivers and records no more of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from gateway.generation.call import Call
from gateway.generation.call_log import CallLog, superseded
from gateway.generation.call_runner import CallRunner
from gateway.generation.handover import Handover
from gateway.generation.log_format import LoggedCall
from gateway.generation.reply import Delivery, Reply, ReplyListener
from gateway.generation.span_attributes import COMMIT, completed
from gateway.observe.metrics import Metrics
from gateway.render.renderer import Message
from gateway.render.segmenter import Piece, Segmenter
from gateway.render.tool_alarm import ToolAlarm
from gateway.render.tool_faults import tool_faults
from gateway.trajectories.recorder import Prompt, Recorder, TurnDetails
from gateway.trajectories.tree import START
from headgate.errors import Conflict, GatewayError
from headgate.types import ABANDONED, Int32Array

log = logging.getLogger(__name__)

Segment = Callable[[Int32Array], Segmenter]
"""Makes a segmenter for the tokens after a prompt."""


class TokenAccount(Protocol):
    """The account to which a reply's tokens are charged."""

    def draw(self, tokens: int) -> None:
        """Charge tokens. Called once, with the number of prompt tokens and sampled tokens together."""
        ...


class _NoReaders(GatewayError):
    """No client reads the reply any more."""


class Completion:
    """Generates a reply in a task of its own. `start` it, then read its `reply`, or `stop` it."""

    def __init__(
        self,
        runner: CallRunner,
        prompt: Prompt,
        details: TurnDetails,
        segment: Segment,
        *,
        recorder: Recorder,
        metrics: Metrics,
        tool_alarm: ToolAlarm,
        grace_s: float,
        account: TokenAccount | None = None,
    ) -> None:
        self.details = details
        self.reply = _reply(runner.call.call_id, details, len(prompt.ids), self)
        self._account = account
        self._runner = runner
        self._prompt = prompt
        self._segment = segment
        self._segmenter = segment(prompt.ids)
        self._recorder = recorder
        self._metrics = metrics
        self._tool_alarm = tool_alarm
        self._grace_s = grace_s
        self._restarts = runner.call.restarts
        self._pieces: list[Piece] = []
        """Pieces that are not yet part of a delivery."""
        self._delivered = 0
        self._whole = False
        """True once every token is sampled."""
        self._given_up = False
        self._stopped_by: GatewayError | None = None
        self._task: asyncio.Task[None] | None = None
        self._call_log: CallLog | None = None
        self._epoch = 1
        self._staged: Delivery | None = None
        """The delivery that is being logged, and is sent to readers afterwards."""

    def resume(self, logged: LoggedCall) -> None:
        """Continue the call of another process from its last logged token. Call this before `start`."""
        assert logged.details is not None
        details = logged.details
        other = logged.images != self._prompt.images
        if other or len(logged.prompt) != len(self._prompt.ids) or (logged.prompt != self._prompt.ids).any():
            self._prompt = replace(self._prompt, ids=logged.prompt, images=logged.images, after=START)
        self._runner.resume(logged)
        self._epoch = logged.log.epoch + 1
        self._restarts = self.call.restarts
        self.details = details
        self.reply = _reply(self.call.call_id, details, len(logged.prompt), self)
        self._segmenter = self._segment(logged.prompt)

    @property
    def call(self) -> Call:
        """The call that generates the reply."""
        return self._runner.call

    def attach_log(self, handover: Handover, place: tuple[str, str]) -> None:
        """Log the sampled tokens, so that another process can continue the call. Call this before `start`."""
        self._call_log = handover.follow(
            place,
            self,
            self.call.turn,
            self._prompt.ids,
            self.details,
            self._epoch,
            images=self._prompt.images,
        )

    def start(self) -> asyncio.Task[None]:
        """Start the task. It runs until a client has the whole reply, or no client can return for it any more."""
        self._task = asyncio.create_task(self._live(), name=f"reply-{self.reply.call_id}")
        return self._task

    async def stop(self, reason: GatewayError) -> None:
        """End the reply; when this returns, the sampled tokens are recorded. Readers get `reason` raised."""
        self._stopped_by = self._stopped_by or reason
        self.reply.move()
        await self._runner.stop(reason)
        if self._task is not None:
            await asyncio.wait({self._task})

    @property
    def joinable(self) -> bool:
        """True if a new reader would get the whole reply."""
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
            if self._call_log is not None:
                self._call_log.end(self.reply.delivered)
            self._release()

    def _release(self) -> None:
        """Break reference cycles, so that many replies do not wait for the garbage collector; charge the tokens."""
        self.reply.detach()
        self._runner.detach()
        prompt_tokens = len(self._prompt.ids)
        if self._account is not None:
            self._account.draw(prompt_tokens + len(self.call.turn.ids))
        facts = partial(completed, self.call, self.details, prompt_tokens)
        self._runner.trace.end(facts, self.reply.failure)

    async def _wait_for_a_reader(self) -> None:
        """Wait until there is a reader. Raise _NoReaders after the grace period, or the reason of `stop`."""
        if self.reply.readers and self._stopped_by is None:
            return
        try:
            async with asyncio.timeout(0 if self._given_up else self._grace_s):
                while self._stopped_by is None and not self.reply.readers:
                    await self.reply.moved()
        except TimeoutError:
            if not self.reply.readers:
                raise _NoReaders("the client disconnected and did not retry") from None
        if self._stopped_by is not None:
            raise self._stopped_by

    async def _generate(self) -> None:
        """Generate until every token is sampled, or the last reader has left."""
        if self._whole:
            return
        if self.call.turn.ids and not self._segmenter.consumed:
            self._on_tokens()  # the tokens that another process has sampled
        if self.call.finish is None and not self._segmenter.stopped:
            self._runner.start(self._on_tokens)
            try:
                await self._runner.wait()
            except _NoReaders:
                return
        if self._segmenter.stopped:
            await self._runner.stop()
            self.call.stopped_at(self._segmenter.consumed)
        self._whole = self.call.finish is not None

    def _on_tokens(self) -> None:
        """Turn new tokens into pieces and, in a stream, into a delivery. The tokens that complete a stop string wait for the
        last delivery. Called for every chunk of tokens, by the task of the call.
        """
        if self._segmenter.stopped:
            return
        if self.call.restarts != self._restarts:
            self._restarts = self.call.restarts
            self._segmenter, self._pieces = self._segment(self._prompt.ids), []
        ids = self.call.turn.ids
        if ids and self.details.first_token_s is None:
            self.details.first_token_s = time.time() - self.details.received_at
            if self.call.entered_at is not None:
                self.details.queued_s = self.call.entered_at - self.details.received_at
        self._pieces += self._segmenter.push(ids[self._segmenter.consumed :])
        if self._segmenter.stopped:
            self._runner.finish_early()
        elif self._call_log is None or not self._call_log.mark_dirty():
            self.stage()
            self.flush()

    def stage(self) -> None:
        """In a stream, make the pieces so far the next delivery."""
        if not self._pieces or not self.details.stream or self._segmenter.stopped or self._whole:
            return
        if self._staged is None:
            self.call.mark_delivered()
            self._staged = self.reply.compose(self._pieces, *self._tokens())
            self._pieces = []

    def flush(self) -> None:
        """Deliver what was staged, unless the reply has ended or another process has taken it over."""
        if self._staged is not None and not self.reply.ended and not self._superseded:
            self.reply.deliver(self._staged)
        self._staged = None

    async def supersede(self) -> None:
        """End the reply here, because another process continues the call."""
        self._stopped_by = self._stopped_by or superseded()
        self.reply.move()
        await self._runner.stop(self._stopped_by)

    @property
    def _superseded(self) -> bool:
        return self._call_log is not None and self._call_log.taken_over

    def _tokens(self) -> tuple[Sequence[int], Sequence[float], Sequence[Sequence[tuple[int, float]]] | None]:
        """Return the tokens since the last delivery, and count them as delivered."""
        turn, start, end = self.call.turn, self._delivered, self._segmenter.consumed
        self._delivered = end
        return turn.ids[start:end], turn.logprobs[start:end], self.call.top[start:end] or None

    async def _commit(self) -> None:
        """Record the turn, then deliver the rest."""
        last = self.reply.compose([*self._pieces, *self._segmenter.finish()], *self._tokens())
        self._pieces = []
        finish = self.call.finish or "stop"
        self.details.finish_reason = "tool_calls" if finish == "stop" and self.reply.tool_calls else finish
        self.details.seconds = time.time() - self.details.received_at
        message = self.reply.message()
        self.details.tool_faults = self._tool_faults(message)
        try:
            await self._record(message)
        except Conflict as error:
            if error.code == "requested_again":
                await self._abandon()
            raise (
                superseded() if error.code in ("recorded_elsewhere", "requested_again") else error
            ) from error
        self._metrics.seconds.observe(time.time() - self.details.received_at)
        self.reply.complete(self.details.seconds, self._segmenter.matched_stop)
        self.flush()
        self.reply.deliver(last)
        self.reply.end(self.details.finish_reason)

    def _tool_faults(self, message: Message) -> list[str]:
        """Return the faults of tool calls that no agent can parse or run, and warn of them."""
        content, calls = message["content"] or "", message.get("tool_calls", [])
        cut = self.details.finish_reason == "length"
        faults = tool_faults(content, calls, self._segmenter.tool_names, cut=cut)
        if faults:
            functions = [call["function"] for call in calls]
            self._tool_alarm.report(self.reply.call_id, faults, content or repr(functions))
        return faults

    async def _abandon(self) -> None:
        self._given_up = True
        await self._runner.stop()
        self.details.finish_reason = self.details.mask_reason = ABANDONED
        if self._call_log is not None and (self._call_log.left_to_others or self._call_log.taken_over):
            return
        try:
            await self._record(None)
        except GatewayError as error:
            log.warning(
                "the sampled tokens of call %s are not recorded: %s", self.reply.call_id, error.message
            )
        except Exception:
            log.exception("the sampled tokens of call %s could not be recorded", self.reply.call_id)

    async def _record(self, message: Message | None) -> None:
        """Record the sampled turn. An abandoned call that sampled nothing shows only in the metrics."""
        turn, details = self.call.turn, self.details
        if message is not None or turn.ids:
            if self._call_log is not None:
                await self._call_log.assert_owner()
            with self._runner.trace.step(COMMIT):
                await self._recorder.record(self.call.episode_id, self._prompt, turn, details, message)
        self._metrics.calls.labels(details.api, details.finish_reason).inc()
        self._metrics.prompt_tokens.inc(len(self._prompt.ids))
        self._metrics.sampled_tokens.inc(len(turn.ids))
        if turn.routes is not None:
            for result, tokens in turn.routes.counts(len(turn.ids)).items():
                self._metrics.routes.labels(result).inc(tokens)
        if details.first_token_s is not None:
            self._metrics.first_token.observe(details.first_token_s)

    async def _linger(self) -> None:
        """Wait until a client has the whole reply, or none has returned for it within the grace period."""
        reply = self.reply
        while self._stopped_by is None and not reply.delivered:
            try:
                async with asyncio.timeout(None if reply.readers else self._grace_s):
                    await reply.moved()
            except TimeoutError:
                if not reply.readers:
                    return

    async def no_readers(self) -> None:
        """Stop the engine when the last reader has left; the tokens are kept if the call can be continued."""
        self._given_up = bool(self.call.pinned) and not self._whole
        await self._runner.stop(_NoReaders("no client reads the reply"))


def _reply(call_id: str, details: TurnDetails, prompt_tokens: int, listener: ReplyListener) -> Reply:
    return Reply(
        call_id,
        details.received_at,
        prompt_tokens,
        temperature=details.used.temperature,
        top_p=details.used.top_p,
        listener=listener,
    )
