"""The state of one call: its prompt, the tokens sampled so far, and where it runs. No I/O.

Only `Call` changes its state; other modules read it and report events by its methods. `call_runner` does the work.

Invariants:
- the turn only grows, except that a pinned call whose engine died starts over, and only while nothing of it was delivered;
- the versions that sampled a token are recorded by the turn (`trajectories.turn`) from what the slot reports when it arrives.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from gateway.engines.base import TokenChunk
from gateway.generation.log_format import LoggedCall, finish_of, top_of
from gateway.trajectories.turn import Turn
from gateway.trajectories.turn_routes import TurnRoutes
from headgate.routes import RouterShape
from headgate.types import FinishReason, ImageSpan, Int32Array, Sampling, TokenFlag

TopLogprobs = list[tuple[int, float]]
"""The likeliest token ids at one position, and their log-probabilities."""


@dataclass(frozen=True, slots=True)
class RoutingHints:
    """Hints for the routing of one call, in addition to its length and the load of the engines."""

    preferred: str = ""
    """The engine to use if it is open; empty: any."""
    avoid: frozenset[str] = frozenset()
    """Engines to use only if there is no other."""


class Call:
    """A prompt and what was sampled after it."""

    def __init__(
        self,
        call_id: str,
        prompt: Int32Array,
        sampling: Sampling,
        *,
        episode_id: str = "",
        min_version: int = 0,
        hints: RoutingHints | None = None,
        images: tuple[ImageSpan, ...] = (),
        logged: LoggedCall | None = None,
        routers: RouterShape | None = None,
        routes_from: int = 0,
        kept: int = 0,
    ) -> None:
        """`min_version`: the oldest version that may sample the call. `images`: those of the prompt. `logged`: the call of
        another process that this one continues. `routers`: those whose routes are recorded, from position `routes_from` on.
        `kept`: the most tokens that a truncated distribution may have kept for them to be recorded."""
        self.call_id: Final = call_id
        self.episode_id: Final = episode_id
        self.prompt: Final = prompt
        self.sampling: Final = sampling
        self._min_version = min_version
        self.images: Final = images
        self._hints = hints or RoutingHints()
        self._routers = routers
        self._routes_from = routes_from
        self._kept = kept if kept and sampling.flags() & TokenFlag.TRUNCATED else 0
        self._turn = Turn(call_id) if logged is None else logged.turn
        routes = self._turn.routes
        if routers is None:
            self._turn.routes = None
        elif routes is None or routes.routers != routers or routes.first > routes_from:
            self._turn.routes = TurnRoutes(routers, len(prompt), routes_from)
        self._top: list[TopLogprobs] = (
            top_of(self._turn) if logged is not None and sampling.top_logprobs else []
        )
        self._finish: FinishReason | None = None if logged is None else finish_of(self._turn, sampling)
        self._engine = self._request_id = ""
        self._restarts = (
            0 if logged is None else logged.log.epoch + 1
        )  # no two requests to engines share an id
        self._delivered = False
        self.entered_at: float | None = None
        """The time of its first run in an engine, in seconds since the epoch."""

    @property
    def min_version(self) -> int:
        """The oldest version that may sample the call."""
        return self._min_version

    def accept_version(self, version: int) -> None:
        """Let an older version sample the call, because the one that it was to try was returned."""
        self._min_version = version

    @property
    def hints(self) -> RoutingHints:
        return self._hints

    @property
    def turn(self) -> Turn:
        """The sampled tokens; only this class changes them."""
        return self._turn

    @property
    def top(self) -> list[TopLogprobs]:
        """The alternatives to each sampled token; empty unless they were requested."""
        return self._top

    @property
    def alternatives(self) -> int:
        """The number of alternatives to each token that the engine is to report: for the client, or to record what was kept."""
        return max(self.sampling.top_logprobs, self._kept)

    @property
    def finish(self) -> FinishReason | None:
        """The finish reason; None while sampling is not complete."""
        return self._finish

    @property
    def engine(self) -> str:
        """The engine in which the call runs now; empty while it is in none."""
        return self._engine

    @property
    def request_id(self) -> str:
        """The id of the call's newest request to an engine."""
        return self._request_id

    @property
    def restarts(self) -> int:
        """The number of times the call started over from its prompt or moved to another process."""
        return self._restarts

    @property
    def delivered(self) -> bool:
        """True once part of the reply was sent to a client."""
        return self._delivered

    @property
    def pinned(self) -> str:
        """The reason why the call cannot move to another engine, such as a seed; empty if it can."""
        return self.sampling.pinned

    @property
    def length(self) -> int:
        """Tokens of the prompt and those sampled so far."""
        return len(self.prompt) + len(self._turn.ids)

    @property
    def has_run(self) -> bool:
        """True once the call has been in an engine; from then on it is never refused, only delayed."""
        return self._turn.engine != ""

    def tokens(self) -> Int32Array:
        """Return the prompt and the tokens sampled so far."""
        if not self._turn.ids:
            return self.prompt
        return np.concatenate([self.prompt, np.asarray(self._turn.ids, np.int32)])

    # Routing

    def redirect(self, engine: str, *, leaving: str = "") -> None:
        """Send the call to `engine` (empty: any) and out of `leaving`, without waiting for an update to finish."""
        avoid = frozenset({leaving}) if leaving else self._hints.avoid
        self._hints = replace(self._hints, preferred=engine, avoid=avoid)

    def avoid_engine(self, engine: str) -> None:
        """Make routing avoid `engine`, which failed the call, until the call is in another one."""
        self._hints = replace(self._hints, avoid=frozenset({engine}))

    def prefer(self, engine: str) -> None:
        """Make the call return to `engine`, which is being updated, if that is open when the call is placed."""
        self._hints = replace(self._hints, preferred=engine)

    # Sampling

    def begin_run(self, engine: str, version: int, request_id: str) -> None:
        """Begin a run in an engine that runs `version`. The hints for this placement are used up."""
        self._engine = self._turn.engine = engine
        if self.entered_at is None:
            self.entered_at = time.time()
        self._request_id = request_id
        self._hints = replace(self._hints, preferred="", avoid=frozenset())
        self._turn.begin_run(version)

    def leave_engine(self) -> None:
        """End the run: the call is in no engine."""
        self._engine = ""

    def weights_changed(self, version: int) -> None:
        """Record that the engine continues under `version`."""
        self._turn.weights_changed(version)

    def append_chunk(self, chunk: TokenChunk) -> None:
        """Add what arrived. The last chunk of a run has the engine's labels, which settle the versions (`Turn.end_run`)."""
        if chunk.ids:
            if chunk.top is not None and self._kept:
                self._turn.keep(chunk.ids, chunk.top)
            self._turn.append(chunk.ids, chunk.logprobs)
            if chunk.top is not None and (most := self.sampling.top_logprobs):
                self._top += [row[:most] for row in chunk.top]
        if chunk.finish is None:
            return
        self._turn.end_run(chunk.labels, chunk.routes)
        if chunk.finish == "abort":
            self._turn.pauses += 1
        else:
            self._finish = chunk.finish

    def check_length(self) -> None:
        """Finish a call that has all of its `max_tokens` although its engine gave it back."""
        if self._finish is None and len(self._turn.ids) >= self.sampling.max_tokens:
            self._finish = "length"

    def stopped_at(self, count: int) -> None:
        """Finish the call after `count` tokens, where a stop string was found."""
        self._turn.truncate(count)
        self._finish = "stop"

    def mark_delivered(self) -> None:
        """Record that part of the reply was sent to a client, so that the call can no longer start over."""
        self._delivered = True

    def start_over(self) -> None:
        """Discard the sampled tokens: the call starts over from its prompt."""
        self._turn.restart()
        self._top.clear()
        self._restarts += 1

    def resumed(self, logged: LoggedCall) -> Call:
        """Return this call with the id, prompt, sampling and tokens that another process has logged."""
        assert logged.details is not None
        same = logged.images == self.images and np.array_equal(logged.prompt, self.prompt)
        return Call(
            logged.turn.call_id,
            logged.prompt,
            logged.details.used,
            episode_id=self.episode_id,
            min_version=self.min_version,
            hints=self._hints,
            images=logged.images,
            logged=logged,
            routers=self._routers,
            routes_from=self._routes_from if same else 0,
            kept=self._kept,
        )
