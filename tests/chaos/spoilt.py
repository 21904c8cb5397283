"""Gateways that are wrong in one way each: `python -m tests.chaos.spoilt NAME serve --config FILE` is one.

The wrong function is put in before the gateway starts. `python -m tests.chaos --mutants` runs each, and the checker must count
what it names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Spoilt:
    """One way to be wrong."""

    wrong: str
    """The count that must rise."""
    put_in: Callable[[], None]


def _put(owner: Any, name: str, spoilt: Any) -> None:
    """Replaces an attribute for good."""
    setattr(owner, name, spoilt)


def _last_token_not_recorded() -> None:
    from gateway.trajectories.recorder import Recorder

    record = Recorder.record

    async def spoilt(self: Any, episode: str, prompt: Any, turn: Any, details: Any, message: Any) -> None:
        if message is not None and len(turn.ids) > 1:
            turn.truncate(len(turn.ids) - 1)
        await record(self, episode, prompt, turn, details, message)

    _put(Recorder, "record", spoilt)


def _other_text() -> None:
    """Sends clients another text than was sampled."""
    from gateway.rollout.reply import Reply

    compose = Reply.compose

    def spoilt(self: Any, pieces: Any, *rest: Any) -> Any:
        return compose(self, [piece._replace(text="?" * len(piece.text)) for piece in pieces], *rest)

    _put(Reply, "compose", spoilt)


def _token_twice() -> None:
    """The third token of a reply is taken twice."""
    from gateway.trajectories.turn import Turn

    append = Turn.append

    def spoilt(self: Any, ids: list[int], logprobs: list[float]) -> None:
        if len(self.ids) == 2 and ids:
            ids, logprobs = [*ids[:1], *ids], [*logprobs[:1], *logprobs]
        append(self, ids, logprobs)

    _put(Turn, "append", spoilt)


def _next_version() -> None:
    from gateway.trajectories.recorder import Recorder

    record = Recorder.record

    async def spoilt(self: Any, episode: str, prompt: Any, turn: Any, details: Any, message: Any) -> None:
        turn.spans = [replace(span, version=span.version + 1, newest=span.newest + 1) for span in turn.spans]
        await record(self, episode, prompt, turn, details, message)

    _put(Recorder, "record", spoilt)


def _batch_leased_again() -> None:
    """An acknowledgement that the ledger does not hear of."""
    from gateway.feed.leases import Leases
    from gateway.store import ledger

    async def spoilt(self: Any, lease_id: str, fence: int, checkpoint: str) -> None:
        self._check(lease_id, fence)
        model = self._ledger.model
        await self._database.submit(lambda c: ledger.end_lease(c, model, fence, "acked", checkpoint))
        self._held = None

    _put(Leases, "ack", spoilt)


def _group_left_out() -> None:
    """The trainer is not given the first group of a batch."""
    from gateway.feed.leases import Leases

    groups = Leases.groups

    async def spoilt(self: Any, lease_id: str, fence: int, cursor: int, wait_s: float) -> Any:
        found = await groups(self, lease_id, fence, cursor, wait_s)
        return replace(found, groups=found.groups[1:]) if cursor == 0 else found

    _put(Leases, "groups", spoilt)


def _any_key() -> None:
    """A key reaches every open episode."""
    from gateway.episodes.callers import Callers

    async def spoilt(self: Any, _caller: Any, episode_id: str) -> Any:
        return await self._episodes.named(episode_id)

    _put(Callers, "reach", spoilt)


SPOILT: dict[str, Spoilt] = {
    "last-token-not-recorded": Spoilt("absent", _last_token_not_recorded),
    "other-text": Spoilt("not_prefix", _other_text),
    "token-twice": Spoilt("doubled", _token_twice),
    "next-version": Spoilt("wrong_version", _next_version),
    "batch-leased-again": Spoilt("trained_twice", _batch_leased_again),
    "group-left-out": Spoilt("never_trained", _group_left_out),
    "any-key": Spoilt("leaks", _any_key),
}


def main() -> None:
    """A gateway that is wrong."""
    name = sys.argv.pop(1)
    SPOILT[name].put_in()
    from gateway.cli import main as gateway

    gateway()


if __name__ == "__main__":
    main()
