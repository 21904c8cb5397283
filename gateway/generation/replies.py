"""Finds the reply to a request: a running one (here or in another process), a recorded one, or the place of a new one.

Owns every reply in progress, finished replies that no client has received completely (for the grace period), and refused requests
that may be retried. Invariants:
- requests with one idempotency key get the same reply, whenever they come;
- a retry without a key gets the reply of the request that it repeats (`retry_matching`), and no other client's;
- equal requests get separate replies, unless the other request's client is known to have disconnected.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from weakref import WeakValueDictionary

from sqlalchemy import Connection

from gateway.generation.completion import Completion, Segment
from gateway.generation.expected_retries import RefusedRequests
from gateway.generation.handover import Handover
from gateway.generation.log_format import LoggedCall
from gateway.generation.reply import Reader, Reply
from gateway.generation.request_key import RequestKey
from gateway.generation.retry_matching import EarlierRequest, RequestState, find_repeated, is_retried
from gateway.generation.running_calls import RunningCalls
from gateway.store import turns
from gateway.store.database import Database
from gateway.store.records import CallRecord
from gateway.trajectories.tree import TokenTree, TreePosition
from headgate.errors import Conflict, GatewayError, OwnedByPeer, Unavailable

log = logging.getLogger(__name__)

_TRIES = 3
"""The number of times a retry looks for its call while other processes take it over."""
_NOT_BACK = ("recorded_elsewhere", "episode_closed", "stopping")
"""Codes of failures after which this process receives no retry of the same call."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A request, the calls of its episode, and the segmenter of its recorded reply."""

    key: RequestKey
    calls: RunningCalls
    segment: Segment


_Source = Completion | LoggedCall | None
"""The source of an earlier request's reply: its maker in this process, its log in the bus, or (None) the record."""


@dataclass(slots=True)
class Claim:
    """One request's place: `reader` reads the reply that exists already; without one, `Replies.start` starts a new reply."""

    request: _Request
    reader: Reader | None = None
    refused: EarlierRequest[_Source] | None = None
    """The refused request that a new reply replaces."""
    log: LoggedCall | None = None
    """The call of a dead process, which a new reply continues; this process has taken its log over."""
    may_be_stored: bool = False
    """True if the store may have the reply after all, because the bus may have lost the call."""


class _First:
    """The claim of a first request, whose retries wait until it ends. A class, as generators cost each call more."""

    __slots__ = ("_beginning", "_claim", "_started")

    def __init__(self, claim: Claim, beginning: dict[tuple[str, str], set[asyncio.Future[None]]]) -> None:
        self._claim = claim
        self._beginning = beginning
        self._started = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Claim:
        self._beginning.setdefault(self._claim.request.key.place, set()).add(self._started)
        return self._claim

    async def __aexit__(self, *_: object) -> None:
        place = self._claim.request.key.place
        self._started.set_result(None)
        starting = self._beginning[place]
        starting.discard(self._started)
        if not starting:
            del self._beginning[place]


class Replies:
    """All replies that clients read or may return for."""

    def __init__(self, database: Database, handover: Handover | None = None) -> None:
        """Without `handover` the calls of other processes are unknown."""
        self._database = database
        self._handover = handover
        self._completions: dict[tuple[str, str], list[Completion]] = {}
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """Serializes the retries of one request."""
        self._beginning: dict[tuple[str, str], set[asyncio.Future[None]]] = {}
        """By place, the first requests whose replies are being started; retries wait for them."""
        self._refused = RefusedRequests(handover)
        self._replaced: set[str] = set()
        """Ending calls that retries have already replaced."""

    def claim(
        self, key: RequestKey, calls: RunningCalls, segment: Segment
    ) -> AbstractAsyncContextManager[Claim]:
        """Find the request's reply, or reserve the place of a new one: until the context ends, retries of the request wait.

        A new reply stays in `calls` while it is generated. `segment` reads the tokens of a recorded one. Raise Unprocessable if
        another request used the idempotency key, OwnedByPeer if another process generates the reply.
        """
        request = _Request(key, calls, segment)
        if key.retry:
            return self._claim_again(request)
        return _First(Claim(request, self._orphan(key)), self._beginning)

    @asynccontextmanager
    async def _claim_again(self, request: _Request) -> AsyncIterator[Claim]:
        place = request.key.place
        async with self._locks.setdefault(place, asyncio.Lock()):
            if underway := self._beginning.get(place):
                await asyncio.wait(underway)
            claim = await self._retry(request)
            try:
                yield claim
            finally:
                if claim.log is not None and self._handover is not None:
                    await self._handover.drop(claim.log)

    def refused(self, key: RequestKey) -> None:
        """Record that a request was refused and may be retried; do nothing for a retry, whose first request is recorded."""
        if not key.retry:
            self._refused.expect(key.place, key.stored, secrets.token_hex(8), time.monotonic())

    async def _retry(self, request: _Request) -> Claim:
        earlier: list[EarlierRequest[_Source]] = []
        for _ in range(_TRIES):
            earlier = await self._earlier(request.key)
            may_be_stored = request.key.exact or len(earlier) < 2
            found = find_repeated(earlier, exact=request.key.exact)
            if found is None:
                return Claim(request, may_be_stored=may_be_stored)
            source = found.source
            if isinstance(source, LoggedCall) and self._is_reachable(source):
                raise self._elsewhere(source)
            if found.state in (RequestState.REFUSED, RequestState.ELSEWHERE):
                refused = found if found.state is RequestState.REFUSED else None
                return Claim(request, refused=refused, may_be_stored=may_be_stored)
            if isinstance(source, Completion):
                return Claim(request, source.reply.read())
            if source is None:
                reader = await self._recorded(request, found.call_id)
                claim = Claim(request, reader) if reader is not None else None
            else:
                claim = await self._taken_over(request, source, may_be_stored=may_be_stored)
            if claim is not None:
                return claim
        return Claim(request, may_be_stored=request.key.exact or len(earlier) < 2)

    async def _taken_over(
        self, request: _Request, logged: LoggedCall, *, may_be_stored: bool
    ) -> Claim | None:
        """Take over the call of a dead process, or read its reply from the record if that process recorded it.

        None: another process was faster, or the reply was given up.
        """
        assert self._handover is not None
        episode_id, call_id = request.key.episode_id, logged.log.call
        if not await self._handover.take_over(logged):
            return None
        try:
            recorded = await self._database.read(lambda c: turns.has_call(c, episode_id, call_id))
        except BaseException:
            await self._handover.drop(logged)
            raise
        if not recorded:
            return Claim(request, log=logged, may_be_stored=may_be_stored)
        await self._handover.drop(logged)
        reader = await self._recorded(request, call_id)
        return Claim(request, reader) if reader is not None else None

    async def start(self, claim: Claim, completion: Completion) -> Reader:
        """Start a new reply, or continue the one of a dead process; return a recorded reply if there is one after all."""
        request = claim.request
        if claim.log is not None:
            completion.resume(claim.log)
        if claim.refused is not None:
            await self._replace_refused(request.key.place, claim.refused)
        if claim.may_be_stored and (reader := await self._stored_reply(request, completion)):
            return reader
        if claim.log is not None:
            log.info("call %s continues here after %d tokens", claim.log.log.call, len(claim.log.turn.ids))
            claim.log = None  # the reply owns it now
        return self._start(request, completion)

    async def _stored_reply(self, request: _Request, completion: Completion) -> Reader | None:
        """Return the recorded reply, or None once older attempts are fenced, so that `completion` makes the reply.

        Queries the store, because the bus may have lost the call.
        """
        if self._handover is None:
            return None
        key, call_id = request.key, completion.reply.call_id
        if await self._database.submit(lambda c: turns.restart(c, key.episode_id, key.name, call_id)):
            return None
        return await self._recorded(request)

    # Earlier requests

    async def _earlier(self, key: RequestKey) -> list[EarlierRequest[_Source]]:
        """Return every earlier request that a retry may repeat. Search this process, then the bus, then the store, so that no
        reply is missed that is recorded during the search.
        """
        here = {c.reply.call_id: c for c in self._completions.get(key.place, ())}
        there: dict[str, LoggedCall] = {}
        expected, looked = self._refused.at(key.place), time.monotonic()
        if self._handover is not None:
            unannounced = set(self._handover.announcing)
            logs = await self._handover.find(key.place)
        if self._handover is not None and logs is not None:
            expected = self._refused.unserved(expected, logs, unannounced)
            own, known = self._handover.process.id, {*here, *expected}
            there = {at.log.call: at for at in logs if at.log.call not in known and at.log.owner != own}
        recorded, restarted = await self._database.read(partial(_recorded_calls, key=key))
        for stored in (
            *(c.details.request_key for c in here.values()),
            *(logged.request_key for logged in there.values()),
            *(call["request_key"] for call in recorded),
        ):
            key.check(stored)
        ids = [call["id"] for call in recorded]
        found: list[EarlierRequest[_Source]] = [
            EarlierRequest(name, RequestState.REFUSED, None, arrived) for name, arrived in expected.items()
        ]
        found += [at for at in map(self._state_here, here.values()) if at and at.call_id not in expected]
        found += [self._state_elsewhere(at, at.log.call in ids, looked) for at in there.values()]
        known = here.keys() | there.keys()
        found += [EarlierRequest(name, RequestState.RECORDED, None) for name in ids if name not in known]
        return [at for at in found if not (restarted and is_retried(at, *restarted, now=time.monotonic()))]

    def _state_here(self, completion: Completion) -> EarlierRequest[_Source] | None:
        """Return the state of a request of this process. None: another process has the call, or a retry has replaced it."""
        reply = completion.reply
        if completion.joinable:
            return EarlierRequest(
                reply.call_id, RequestState.LOST if reply.orphaned else RequestState.HERE, completion
            )
        if reply.call_id in self._replaced or _is_elsewhere(reply.failure):
            return None
        return EarlierRequest(reply.call_id, RequestState.REFUSED, completion, completion.details.arrived)

    def _state_elsewhere(self, logged: LoggedCall, recorded: bool, looked: float) -> EarlierRequest[_Source]:
        """Return the state of a request in the bus. `looked`: when the bus was read, by the monotonic clock."""
        assert self._handover is not None
        if logged.refused or (
            logged.log.url is None and not recorded and not self._handover.can_take_over(logged)
        ):
            arrived = looked - logged.age_s if logged.refused else None
            return EarlierRequest(logged.log.call, RequestState.REFUSED, logged, arrived)
        if logged.log.url is not None:
            return EarlierRequest(logged.log.call, RequestState.ELSEWHERE, logged)
        return EarlierRequest(logged.log.call, RequestState.LOST, logged)

    def _is_reachable(self, logged: LoggedCall) -> bool:
        """Return whether a request can be sent on to the process that has a call."""
        own = self._handover and self._handover.process.url
        return bool(own and logged.log.url and not logged.refused)

    def _elsewhere(self, logged: LoggedCall) -> OwnedByPeer:
        assert self._handover is not None and logged.log.url
        return OwnedByPeer(logged.log.url, partial(self._handover.alive, logged.log.owner))

    async def _replace_refused(self, place: tuple[str, str], request: EarlierRequest[_Source]) -> None:
        """Forget a refused request that has been retried."""
        if isinstance(request.source, LoggedCall):
            assert self._handover is not None
            if request.source.refused:
                self._handover.end_refused(request.call_id)
            elif await self._handover.take_over(request.source):
                await self._handover.drop(request.source)
        elif request.source is not None:
            self._replaced.add(request.call_id)
        else:
            self._refused.served(place, request.call_id)

    async def close(self) -> None:
        """End every reply. Calls that are logged in the bus are left to other processes; the tokens of others are recorded."""
        if self._handover is not None:
            await self._handover.leave()
        reason = Unavailable("the gateway is being stopped", retry_after=1.0, code="stopping")
        found = [completion for some in self._completions.values() for completion in some]
        await asyncio.gather(*(completion.stop(reason) for completion in found))

    def _orphan(self, key: RequestKey) -> Reader | None:
        """Return a reply to an equal request whose client has disconnected."""
        found = (c for c in self._completions.get(key.place, ()) if c.joinable and c.reply.orphaned)
        completion = next(found, None)
        return completion.reply.read() if completion else None

    def _start(self, request: _Request, completion: Completion) -> Reader:
        key, calls = request.key, request.calls
        calls.add(completion)
        if self._handover is not None:
            completion.attach_log(self._handover, key.place)
        together = self._completions.setdefault(key.place, [])
        together.append(completion)
        reader = completion.reply.read()

        def ended(_: asyncio.Task[None]) -> None:
            calls.discard(completion)
            together.remove(completion)
            if not together:
                del self._completions[key.place]
            failure, call_id = completion.reply.failure, completion.reply.call_id
            if call_id in self._replaced:
                self._replaced.discard(call_id)
            elif failure is not None and not key.exact and not _is_elsewhere(failure):
                self._refused.expect(key.place, key.stored, call_id, completion.details.arrived)

        completion.start().add_done_callback(ended)
        return reader

    async def _recorded(self, request: _Request, call_id: str = "") -> Reader | None:
        """Read the recorded reply of a call, or the newest one, from its tokens."""
        key = request.key

        def read(connection: Connection) -> tuple[CallRecord, TokenTree] | None:
            calls = turns.calls_with_reply(connection, key.episode_id, key.name)
            call = next((call for call in calls if call_id in ("", call["id"])), None)
            if call is None:
                return None
            key.check(call["request_key"])
            if call["used"].get("redacted"):
                raise _redacted(call["id"])
            return call, TokenTree(turns.nodes(connection, call["model"], [key.episode_id])[key.episode_id])

        found = await self._database.read(read)
        return _replay(*found, request.segment).read() if found else None


def _redacted(call_id: str) -> Conflict:
    message = (
        f"the reply of call {call_id} was redacted when it was stored ([redaction]), and cannot be sent again"
    )
    return Conflict(message, code="reply_redacted")


def _replay(call: CallRecord, tree: TokenTree, segment: Segment) -> Reply:
    node = tree.nodes[call["node"]]
    prompt, ids = call["prompt_tokens"], node.ids.tolist()
    segmenter = segment(tree.path(TreePosition(node.parent, node.at, prompt)))
    used = call["used"]
    reply = Reply(
        call["id"], call["received_at"], prompt, temperature=used["temperature"], top_p=used["top_p"]
    )
    pieces = [*segmenter.push(ids), *segmenter.finish()]
    reply.complete(call["seconds"], segmenter.matched_stop)
    reply.deliver(reply.compose(pieces, ids, node.logprobs.tolist()))
    reply.end(call["finish_reason"])
    return reply


def _recorded_calls(
    connection: Connection, key: RequestKey
) -> tuple[list[CallRecord], tuple[str, float] | None]:
    """Return the recorded calls with a reply to a request, and the call that a retry of it has restarted."""
    recorded = turns.calls_with_reply(connection, key.episode_id, key.name)
    return recorded, turns.restarted(connection, key.episode_id, key.name)


def _is_elsewhere(failure: Exception | None) -> bool:
    """Return whether this process will receive no retry of a call that failed here."""
    return isinstance(failure, GatewayError) and failure.code in _NOT_BACK
