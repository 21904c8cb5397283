"""Gateways that are wrong in one function each, for as long as the context lasts that each of these functions returns."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

Context = AbstractContextManager[Any]


def _wrong(*changes: tuple[str, Callable[[Any], Any]]) -> Context:
    """Replace each `package.module:Owner.attribute` by what the function makes of the original."""
    stack = ExitStack()
    for target, make in changes:
        original = pkgutil.resolve_name(target)
        stack.enter_context(mock.patch(target.replace(":", "."), make(original)))
    return stack


# Records

_APPEND = "gateway.trajectories.turn:Turn.append"


def _before_record(change: Callable[[Any, Any], None]) -> Context:
    """Change turns before they are recorded; the second argument is the message, or None for one that broke off."""

    def make(record: Any) -> Any:
        async def wrong(self: Any, episode: str, prompt: Any, turn: Any, details: Any, message: Any) -> None:
            change(turn, message)
            await record(self, episode, prompt, turn, details, message)

        return wrong

    return _wrong(("gateway.trajectories.recorder:Recorder.record", make))


def last_token_not_recorded() -> Context:
    """Cut the last token off every record."""

    def change(turn: Any, message: Any) -> None:
        if message is not None and len(turn.ids) > 1:
            turn.truncate(len(turn.ids) - 1)

    return _before_record(change)


def next_version() -> Context:
    """Label every token with the version after the right one."""

    def change(turn: Any, _message: Any) -> None:
        later = [replace(span, version=span.version + 1, newest=span.newest + 1) for span in turn.spans]
        turn.spans = later

    return _before_record(change)


def labels_shifted() -> Context:
    """Give every token the label of the token before it."""

    def change(turn: Any, _message: Any) -> None:
        labels = [replace(span, count=1) for span in turn.spans for _ in range(span.count)]
        turn.spans = [*labels[:1], *labels[:-1]]

    return _before_record(change)


def labels_at_arrival() -> Context:
    """Label a token with the newest version when it arrives, whatever the engine reports about it later.

    The tokens in the pipe when an engine is held arrive after its update, however long that takes.
    """

    def late(hold: Any) -> Any:
        async def wrong(self: Any, slot: Any, weights: Any) -> None:
            slot.hold_output()
            await hold(self, slot, weights)

        return wrong

    def labeled(append: Any) -> Any:
        def wrong(self: Any, ids: list[int], logprobs: list[float]) -> None:
            crossed, self._run_versions = self._run_versions, self._run_versions[-1:]
            append(self, ids, logprobs)
            self._run_versions = crossed

        return wrong

    unread = ("gateway.trajectories.turn:Turn.end_run", lambda _: lambda _self, _account, _routes=None: None)
    return _wrong(("gateway.updates.engine_steps:EngineSteps._hold", late), (_APPEND, labeled), unread)


def routes_shifted() -> Context:
    """Give every token the experts of the token before it."""

    def make(end_run: Any) -> Any:
        def wrong(self: Any, labels: Any, routes: Any) -> None:
            end_run(self, labels, None if routes is None else np.roll(routes, 1, axis=0))

        return wrong

    return _wrong(("gateway.trajectories.turn:Turn.end_run", make))


def _on_append(change: Callable[[Any, list[Any]], list[Any]]) -> Context:
    """Change token ids and log-probabilities before a turn appends them."""

    def make(append: Any) -> Any:
        def wrong(self: Any, ids: list[int], logprobs: list[float]) -> None:
            changed = change(self, [*zip(ids, logprobs, strict=True)])
            append(self, [token for token, _ in changed], [logprob for _, logprob in changed])

        return wrong

    return _wrong((_APPEND, make))


def token_twice() -> Context:
    """Append the third token of a reply twice."""
    return _on_append(lambda turn, new: [*new[:1], *new] if len(turn.ids) == 2 else new)


def _at_the_seam(change: Callable[[list[Any]], list[Any]]) -> Context:
    """Change the first tokens after a call continued in another engine, or under other weights."""
    known = set()

    def change_first(turn: Any, new: list[Any]) -> list[Any]:
        piece = (turn.call_id, turn._start, len(turn._run_versions))
        if not new or piece in known:
            return new
        known.add(piece)
        return change(new) if turn.ids else new

    return _on_append(change_first)


def seam_token_dropped() -> Context:
    """Drop the first token after a seam."""
    return _at_the_seam(lambda values: values[1:])


def seam_token_doubled() -> Context:
    """Double the first token after a seam."""
    return _at_the_seam(lambda values: values[:1] + values)


def other_text() -> Context:
    """Send clients another text than was sampled."""

    def make(compose: Any) -> Any:
        def wrong(self: Any, pieces: Any, *rest: Any) -> Any:
            return compose(self, [piece._replace(text="?" * len(piece.text)) for piece in pieces], *rest)

        return wrong

    return _wrong(("gateway.generation.reply:Reply.compose", make))


# Batches and keys


def batch_leased_again() -> Context:
    """Store an acknowledgement that the ledger never receives."""

    def make(_ack: Any) -> Any:
        from gateway.store import ledger

        async def wrong(self: Any, lease_id: str, fence: int, checkpoint: str) -> None:
            self._check(lease_id, fence)
            model = self._ledger.model
            await self._database.submit(lambda c: ledger.end_lease(c, model, fence, "acked", checkpoint))
            self._held = None

        return wrong

    return _wrong(("gateway.training_feed.leases:Leases.ack", make))


def group_left_out() -> Context:
    """Withhold the first group of a batch from the trainer."""

    def make(groups: Any) -> Any:
        async def wrong(self: Any, lease_id: str, fence: int, cursor: int, wait_s: float) -> Any:
            found = await groups(self, lease_id, fence, cursor, wait_s)
            return replace(found, groups=found.groups[1:]) if cursor == 0 else found

        return wrong

    return _wrong(("gateway.training_feed.leases:Leases.groups", make))


def any_key() -> Context:
    """Let every key reach every open episode."""

    def make(_reach: Any) -> Any:
        async def wrong(self: Any, _caller: Any, episode_id: str) -> Any:
            return await self._episodes.named(episode_id)

        return wrong

    return _wrong(("gateway.episodes.callers:Callers.reach", make))


# The seam between two gateways


def body_dropped() -> Context:
    """Forward the length of a body without the body."""

    def make(request: Any) -> Any:
        def wrong(self: Any, method: str, url: Any, **more: Any) -> Any:
            if method in ("GET", "HEAD", "DELETE") and more.get("data") is not None:
                length = str(len(more.pop("data").getvalue()))
                more["headers"] = [*more["headers"], ("Content-Length", length)]
            return request(self, method, url, **more)

        return wrong

    return _wrong(("aiohttp:ClientSession.request", make))


def keys_unchecked() -> Context:
    """Forward every request for the admin API."""

    def make(_reached: Any) -> Any:
        return lambda projects, _key: projects.root

    return _wrong(("gateway.api.middleware.forward:reached", make))


def headers_copied() -> Context:
    """Copy the headers of the client's connection to the other one."""

    def make(_end_to_end: Any) -> Any:
        return lambda headers, _dropped: [(name, value) for name, value in headers if name != b"host"]

    return _wrong(("gateway.api.middleware.hop:end_to_end", make))
