"""The log of one running call: what another process needs to continue the call.

Owns the state of one log. Invariants: a log is written by its owner alone; an entry begins where the last written one ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gateway.bus.base import Entry, Outcome
from gateway.generation import log_format
from gateway.generation.log_format import TOKEN_BYTES
from gateway.trajectories.recorder import TurnDetails
from gateway.trajectories.turn import Turn
from headgate.errors import Unavailable
from headgate.types import ImageSpan, Int32Array


class LogWriter(Protocol):
    """Writes the logs of all calls of this process: `Handover`."""

    def mark_dirty(self, call_log: CallLog) -> bool:
        """Schedule a call's new tokens for the log. False: nothing is logged any more."""
        ...

    async def assert_owner(self, call_log: CallLog) -> None:
        """Check that the log is still this process's, unless its heartbeat is recent enough to be sure."""
        ...


class Logged(Protocol):
    """The part of a `Completion` that its log needs."""

    def stage(self) -> None:
        """Make what was received so far the next delivery, to log it."""
        ...

    def flush(self) -> None:
        """Deliver what was staged."""
        ...

    async def supersede(self) -> None:
        """End the reply here, because another process continues the call."""
        ...


class CallLog:
    """The log of one running call of this process."""

    def __init__(
        self,
        writer: LogWriter,
        place: str,
        call: Logged,
        turn: Turn,
        prompt: Int32Array,
        details: TurnDetails,
        epoch: int,
        images: Sequence[ImageSpan] = (),
    ) -> None:
        """`epoch` above 1: the call was taken over, and its log exists."""
        self.call = call
        self.call_id = turn.call_id
        self.taken_over = False
        """True once another process owns the log."""
        self.left_to_others = False
        """True if the log stays when the call ends, for another process to take over."""
        self.ended = False
        self.written_at = 0.0
        self._writer = writer
        self._place = place
        self._turn = turn
        self._prompt = prompt
        self._images = images
        self._details = details
        self._epoch = epoch
        self._exists = epoch > 1
        self._logged = self._sent = len(turn.ids) if self._exists else 0
        self._routed = self._sent_routes = 0 if turn.routes is None else -1
        """The position up to which experts are logged; of those in a log that was taken over, nothing is known."""

    @property
    def movable(self) -> bool:
        """True if another process could continue the call."""
        return not self._details.used.pinned

    @property
    def logged(self) -> bool:
        """True if another process could continue the call now."""
        return self.movable and self._exists and not self.ended

    def mark_dirty(self) -> bool:
        """Schedule new tokens for the log. False: they will not be logged, so deliver them now."""
        if not self.movable or self.ended:
            return False
        return self._writer.mark_dirty(self)

    async def assert_owner(self) -> None:
        """Raise Unavailable if another process has taken the call over."""
        if not self.taken_over:
            await self._writer.assert_owner(self)
        if self.taken_over:
            raise superseded()

    def end(self, delivered: bool = False) -> None:
        """End the log: a client has the whole reply (`delivered`), or no client will get it."""
        if not (self.ended or self.taken_over):
            # What is left to others gets what its run reported at the end.
            self.ended = delivered or not self.left_to_others
            self._writer.mark_dirty(self)

    def leave(self) -> None:
        """Leave the log to another process, if that could continue the call."""
        self.left_to_others = self.logged and not self.taken_over

    def entry(self) -> Entry:
        """Return the next entry of the log."""
        turn = self._turn
        if self.ended:
            return Entry(self.call_id, self._place, self._epoch, b"", b"", 0, b"", over=True)
        self._sent, self._sent_routes = len(turn.ids), 0 if turn.routes is None else turn.routes.next
        state = log_format.state_of(turn, self._details)
        if self._exists and self._routed == self._sent_routes:
            body = log_format.body_of(turn, self._logged) if self.movable else b""
            at = self._logged * TOKEN_BYTES if self.movable else 0
            return Entry(self.call_id, self._place, self._epoch, b"", state, at, body)
        head = log_format.head_of(self._prompt, self._details, self._images, turn.routes)
        body = log_format.body_of(turn, 0) if self.movable else b""
        return Entry(self.call_id, self._place, self._epoch, head, state, 0, body)

    def ack(self, outcome: Outcome, now: float) -> None:
        """Apply the outcome of the newest entry."""
        if outcome == "written":
            self._exists, self._logged, self.written_at = True, self._sent, now
            self._routed = self._sent_routes
            self.call.flush()
        elif outcome == "gone":
            self._exists, self._logged = False, 0
            self._writer.mark_dirty(self)
        else:
            self.taken_over = True


def superseded() -> Unavailable:
    """Return the error for clients of a call that another process has taken over or recorded."""
    message = "another gateway process has this call; retry to get its reply"
    return Unavailable(message, retry_after=0.5, code="recorded_elsewhere")
