"""Which reply a request gets: one in the making, here or in another process, one from the record, or a new one (design, R4).

Owns every reply in the making, and for the grace period every finished one that no client has had whole. Invariants: requests
that are retries of one another get the same reply, at whatever moment each of them comes; requests that merely say the same are
samples of their own, unless the client of the other one is known to be gone.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from sqlalchemy import Connection

from gateway.errors import Elsewhere, Unavailable, Unprocessable
from gateway.rollout.completion import Completion, Segment
from gateway.rollout.handover import Handover
from gateway.rollout.logged import LoggedCall
from gateway.rollout.reply import Reader, Reply
from gateway.rollout.upstream import UpstreamCall
from gateway.store import turns
from gateway.store.database import Database
from gateway.trajectories.tree import Place, TokenTree

log = logging.getLogger(__name__)

_TRIES = 3
"""How often a retry looks for its call while other processes take it."""

Calls = set[Completion | UpstreamCall]
"""What runs in an episode."""


@dataclass(frozen=True, slots=True)
class RequestKey:
    """By what a request is known again within its episode: `name` is of its idempotency key if it has one, else of its body."""

    episode_id: str
    name: str
    body: str
    retry: bool

    @classmethod
    def of(cls, episode_id: str, body: bytes, idempotency_key: str, retries: int) -> RequestKey:
        """A request with an idempotency key counts as a retry, for there is no telling the first one."""
        content = hashlib.blake2b(body, digest_size=16, person=b"body").hexdigest()
        if not idempotency_key:
            return cls(episode_id, content, content, retries > 0)
        key = hashlib.blake2b(idempotency_key.encode(), digest_size=16, person=b"key").hexdigest()
        return cls(episode_id, key, content, True)

    def choice(self, index: int) -> RequestKey:
        """Of one of the choices that the request asks for."""
        if index == 0:
            return self
        name = hashlib.blake2b(f"{self.name}:{index}".encode(), digest_size=16).hexdigest()
        return replace(self, name=name)

    @property
    def stored(self) -> str:
        """As calls are stored with it; begins with the name."""
        return self.name + self.body

    @property
    def place(self) -> tuple[str, str]:
        """What retries of one another have in common."""
        return self.episode_id, self.name


class Replies:
    """Every reply that somebody reads or may come back for."""

    def __init__(self, database: Database, handover: Handover | None = None) -> None:
        """Without `handover` the calls of other processes are not known."""
        self._database = database
        self._handover = handover
        self._completions: dict[tuple[str, str], list[Completion]] = {}
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """A request finds or begins its reply alone among its retries."""

    async def open(
        self,
        key: RequestKey,
        calls: Calls,
        begin: Callable[[], Awaitable[Completion]],
        segment: Segment,
    ) -> Reader:
        """A reader of the request's reply. `begin` makes a new one, which is in `calls` as long as it lives.

        Raises Unprocessable if the request's idempotency key was that of another request, Elsewhere if another process makes
        the reply, and what `begin` raises.
        """
        if not key.retry:
            return self._join(key) or self._start(key, calls, await begin())
        async with self._locks.setdefault(key.place, asyncio.Lock()):
            if reader := self._join(key) or await self._recorded(key, segment):
                return reader
            if (logged := await self._taken_over(key)) is None:
                completion = await begin()
                return await self._answered(key, completion, segment) or self._start(key, calls, completion)
            return await self._resumed(key, calls, begin, segment, logged)

    async def _resumed(
        self,
        key: RequestKey,
        calls: Calls,
        begin: Callable[[], Awaitable[Completion]],
        segment: Segment,
        logged: LoggedCall,
    ) -> Reader:
        """The reply that another process has begun; if it has recorded that before it went, from the record."""
        assert self._handover is not None
        call_id = logged.log.call
        try:
            recorded = await self._database.read(lambda c: turns.has_call(c, key.episode_id, call_id))
            completion = await begin()
            if not recorded:
                completion.resume(logged)
            answered = await self._answered(key, completion, segment)
        except BaseException:
            await self._handover.drop(logged)
            raise
        if recorded or answered:
            await self._handover.drop(logged)
        else:
            log.info("call %s goes on here after %d tokens", call_id, len(logged.turn.ids))
        return answered or self._start(key, calls, completion)

    async def _answered(self, key: RequestKey, completion: Completion, segment: Segment) -> Reader | None:
        """The recorded reply. None: `completion` is to make it, and no call that runs elsewhere will be recorded as the answer.

        The bus may have lost that there is such a call, so the store is asked.
        """
        if self._handover is None:
            return None
        name, call_id = key.name, completion.reply.call_id
        if await self._database.submit(lambda c: turns.begin_anew(c, key.episode_id, name, call_id)):
            return None
        return await self._recorded(key, segment)

    async def _taken_over(self, key: RequestKey) -> LoggedCall | None:
        """The running call of a process that is gone, which is now this one's. Raises Elsewhere if its process is alive."""
        if self._handover is None:
            return None
        own = self._handover.process
        for _ in range(_TRIES):
            found = await self._handover.find(key.place)
            for call in found:
                _check(key, call.request_key)
            if any(call.log.owner == own.id for call in found):
                return None
            orphans = [call for call in found if self._handover.can_take(call)]
            for call in orphans:
                if await self._handover.take(call):
                    return call
            if not orphans:
                there = [(call.log.url, call.log.owner) for call in found if call.log.url]
                if there and own.url:
                    url, owner = there[0]
                    raise Elsewhere(url, partial(self._handover.alive, owner))
                return None
        return None

    async def close(self) -> None:
        """Ends every reply. What was sampled is left to another process if it is in the bus, and else recorded."""
        if self._handover is not None:
            await self._handover.leave()
        reason = Unavailable("the gateway is being stopped", retry_after=1.0, code="stopping")
        found = [completion for some in self._completions.values() for completion in some]
        await asyncio.gather(*(completion.stop(reason) for completion in found))

    def _join(self, key: RequestKey) -> Reader | None:
        """The reply whose client is gone, before one that has a client."""
        found = [c for c in self._completions.get(key.place, ()) if c.joinable]
        for completion in found:
            _check(key, completion.details.request_key)
        chosen = [c for c in found if c.reply.orphaned] or (found if key.retry else [])
        return chosen[0].reply.read() if chosen else None

    def _start(self, key: RequestKey, calls: Calls, completion: Completion) -> Reader:
        if self._handover is not None:
            completion.log_in(self._handover, key.place)
        together = self._completions.setdefault(key.place, [])
        together.append(completion)
        calls.add(completion)
        reader = completion.reply.read()

        def ended(_: asyncio.Task[None]) -> None:
            calls.discard(completion)
            together.remove(completion)
            if not together:
                del self._completions[key.place]

        completion.start().add_done_callback(ended)
        return reader

    async def _recorded(self, key: RequestKey, segment: Segment) -> Reader | None:
        """The newest recorded reply to the request, made from its tokens as the first one was."""

        def read(connection: Connection) -> tuple[dict[str, Any], TokenTree] | None:
            call = turns.answered(connection, key.episode_id, key.name)
            if call is None:
                return None
            _check(key, call["request_key"])
            return call, TokenTree(turns.nodes(connection, call["model"], [key.episode_id])[key.episode_id])

        found = await self._database.read(read)
        return _replay(*found, segment).read() if found else None


def _replay(call: dict[str, Any], tree: TokenTree, segment: Segment) -> Reply:
    node = tree.nodes[call["node"]]
    prompt, ids = call["prompt_tokens"], node.ids.tolist()
    segmenter = segment(tree.path(Place(node.index, len(ids), prompt + len(ids)))[:prompt])
    used = call["used"]
    reply = Reply(
        call["id"], call["received_at"], prompt, temperature=used["temperature"], top_p=used["top_p"]
    )
    reply.seconds = call["seconds"]
    pieces = [*segmenter.push(ids), *segmenter.finish()]
    reply.matched_stop = segmenter.matched_stop
    reply.deliver(reply.compose(pieces, ids, node.logprobs.tolist()))
    reply.end(call["finish_reason"])
    return reply


def _check(key: RequestKey, stored: str) -> None:
    if stored != key.stored:
        message = "this idempotency key was used for a request with another body"
        raise Unprocessable(message, code="idempotency_key_reused", param="Idempotency-Key")
