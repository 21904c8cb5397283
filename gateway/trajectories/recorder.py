"""Turns requests into places in an episode's token tree, and finished calls into committed turns.

Owns the trees of open episodes; a tree that is not in memory is read from the store. A turn is added to the tree and submitted to
the store without an await in between, so the tree's order is the store's order; `record` returns once the turn is committed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from gateway.render.images import keyed, names_in, unkeyed
from gateway.render.offload import is_long, offload, offload_long
from gateway.render.redaction import Redactor, Secrets
from gateway.render.renderer import ChatRenderer, Message, Tool
from gateway.render.template_options import NONE, Switches
from gateway.store import turns
from gateway.store.commits import Rows
from gateway.store.database import Database
from gateway.store.records import CallRecord
from gateway.trajectories.conversation import Chain
from gateway.trajectories.episode_tree import ConversationEnd, EpisodeTree
from gateway.trajectories.redacted import Redaction
from gateway.trajectories.tree import START, TokenTree, TreePosition
from gateway.trajectories.turn import Span, Turn
from headgate.errors import Unavailable
from headgate.kept import Kept
from headgate.types import (
    UNUSABLE_LOGPROB,
    Float32Array,
    ImageSpan,
    Int32Array,
    Node,
    Sampling,
    TokenFlag,
    UInt8Array,
)

_PART = 65_536
"""Ids that are converted in one piece."""
_TRIES = 16
LOGPROBS_MODE = "processed_logprobs"
_EMPTY_IDS: Int32Array = np.empty(0, np.int32)
_EMPTY_LOGPROBS: Float32Array = np.empty(0, np.float32)
_EMPTY_FLAGS: UInt8Array = np.empty(0, np.uint8)


@dataclass(slots=True)
class Prompt:
    """The input of an engine for a request."""

    ids: Int32Array
    chain: Chain | None
    """The digests of its conversation; None for a prompt that the caller made itself."""
    after: TreePosition = START
    """The recorded turn that the prompt extends token by token; the root if it extends none."""
    switches: Switches = NONE
    """The switches with which the template wrote it."""
    images: tuple[ImageSpan, ...] = ()
    """The images among its tokens, in their order."""
    secrets: Secrets = field(default_factory=dict)
    """What is redacted in its messages."""

    @property
    def bridged(self) -> bool:
        """True if the prompt extends a recorded turn."""
        return self.after is not START


@dataclass(slots=True)
class TurnDetails:
    """The stored facts about a call, apart from its tokens."""

    api: str
    stream: bool
    requested: dict[str, Any]
    used: Sampling
    received_at: float
    first_token_s: float | None = None
    finish_reason: str = "stop"
    mask_reason: str = ""
    request_key: str = ""
    arrived: float = field(default_factory=lambda: time.monotonic(), compare=False)
    """The moment at which this process got the call, by its monotonic clock."""
    tool_faults: list[str] = field(default_factory=list, compare=False)
    """The faults of the reply's tool calls (`render/tool_faults.py`), once it is whole."""
    queued_s: float | None = field(default=None, compare=False)
    """The time from `received_at` until an engine had the call; None: not known."""
    seconds: float | None = field(default=None, compare=False)
    """The time from `received_at` until the reply was whole; None: until it is recorded."""


class Exclusivity(Protocol):
    """What knows which processes serve an episode."""

    async def serves_exclusively(self, episode_id: str) -> bool:
        """Return true if no other process serves the episode. False if that is not known."""
        ...


class Recorder:
    """Every open episode's trajectory, as far as one model has a part in it."""

    def __init__(
        self,
        database: Database,
        renderer: ChatRenderer,
        model: str,
        exclusivity: Exclusivity | None = None,
        redactor: Redactor | None = None,
    ) -> None:
        """`redactor`: what keeps secrets from the store. `exclusivity`: where other processes record turns of
        the same episodes, what knows which of them no other serves."""
        self._exclusivity = exclusivity
        self._redactor = redactor or Redactor()
        self._database = database
        self._renderer = renderer
        self._model = model
        self._trees: dict[str, EpisodeTree] = {}

    def begin(self, episode_id: str) -> None:
        """Add a new episode, which has nothing in the store."""
        self._trees[episode_id] = EpisodeTree(TokenTree())

    async def prepare(
        self, episode_id: str, messages: list[Message], tools: Sequence[Tool], switches: Switches = NONE
    ) -> Prompt:
        """Return the prompt for a reply to `messages`: the recorded tokens extended where possible, else a fresh rendering.

        Raise BadRequest if the template refuses the messages.
        """
        long = is_long((messages, tools))
        chain = await offload_long(long, lambda: Chain(messages, tools, self._redactor.hash_key))
        secrets = await offload_long(long, lambda: self._redactor.secrets(messages, tools))
        episode = await self._episode_tree(episode_id)
        renderer = self._renderer.switched(switches)
        system = any(message["role"] in ("system", "developer") for message in messages[:1])
        for known in range(len(messages) - 1 if episode.ends else 0, 0, -1):
            end = episode.end(chain.digests[known], messages, known, switches)
            if end is None:
                continue
            history, new = episode.tree.path(end), messages[known:]
            sampled_from = end.length - len(episode.tree.nodes[end.node].ids)
            bridge = partial(renderer.bridge, history, sampled_from, new, tools, system=system)
            suffix = await offload((new, tools), bridge)
            if suffix is not None:
                added, images = unkeyed(np.asarray(suffix, np.int32), names_in(new), renderer.vision)
                images = tuple(image._replace(offset=end.length + image.offset) for image in images)
                ids = np.concatenate([history, added])
                return Prompt(ids, chain, end, switches, (*episode.tree.images(end), *images), secrets)
            break
        rendered = await offload_long(long, lambda: _array(renderer.render(messages, tools)))
        ids, images = unkeyed(rendered, names_in(messages), renderer.vision)
        return Prompt(ids, chain, START, switches, images, secrets)

    async def encode_prompt(self, prompt: str | Sequence[int]) -> Prompt:
        """Return a prompt that the caller made itself."""
        encode = self._renderer.encode
        ids = await offload(prompt, lambda: _array(encode(prompt) if isinstance(prompt, str) else prompt))
        if not self._redactor.active:
            return Prompt(ids, None)
        text = prompt if isinstance(prompt, str) else self._renderer.decode(prompt)
        return Prompt(ids, None, secrets=await offload(text, lambda: self._redactor.secrets(text)))

    async def record(
        self, episode_id: str, prompt: Prompt, turn: Turn, details: TurnDetails, reply: Message | None
    ) -> None:
        """Add a turn to the tree and commit it. `reply`: the message that the client got; None if it got no whole one.

        Raise Conflict if another process has recorded the call (`recorded_elsewhere`) or its request (`requested_again`), or
        if the episode's run is over.
        """
        redaction = await self._redaction(prompt, turn, details, reply)
        for tries in range(_TRIES):
            episode = await self._episode_tree(episode_id, reload=tries > 0)
            try:
                return await self._commit(episode, episode_id, prompt, turn, details, reply, redaction)
            except _TreeChanged:
                prompt.after = START  # the position belonged to the other tree
        raise Unavailable(
            f"episode {episode_id} changes faster than this call can be recorded",
            retry_after=1.0,
            code="contended",
        )

    async def _commit(
        self,
        episode: EpisodeTree,
        episode_id: str,
        prompt: Prompt,
        turn: Turn,
        details: TurnDetails,
        reply: Message | None,
        redaction: Redaction | None,
    ) -> None:
        nodes = self._nodes(episode.tree, prompt, turn, details)
        places = [episode.tree.add(node) for node in nodes]
        digest = b""
        if reply is not None and prompt.chain is not None:
            digest = prompt.chain.followed_by(reply)
            episode.add(digest, ConversationEnd(turn.call_id, places[-1], prompt.switches.variables))
        row = self._call_row(episode_id, nodes[-1].index, prompt, turn, details, digest)
        stored = nodes if turn.routes is None else turn.routes.attached_to(nodes)
        if redaction is not None:
            stored = redaction.stored(stored)
            row["requested"] = redaction.requested
            if redaction.reply_tokens:
                row["used"] = {**row["used"], "redacted": redaction.reply_tokens}
        write = Rows(turns.insert_turns, (stored, row))
        if self._exclusivity is not None:
            write = Rows(_insert, (episode, ((stored, row), details.arrived)))
        episode.pending += 1
        try:
            await self._database.submit(write)
        except Exception:
            self._forget(episode_id, episode)  # the tree in memory must not hold what the store does not
            raise
        finally:
            episode.pending -= 1

    async def _redaction(
        self, prompt: Prompt, turn: Turn, details: TurnDetails, reply: Message | None
    ) -> Redaction | None:
        """Return what may not be stored of a turn; None if nothing is redacted."""
        if not self._redactor.active:
            return None
        ids = np.concatenate([prompt.ids, np.asarray(turn.ids, np.int32)])
        size = len(prompt.ids)

        def find() -> Redaction:
            secrets = {**prompt.secrets, **self._redactor.secrets(details.requested, reply)}
            tokens = self._redactor.tokens(ids, self._renderer.text_stream(), secrets, size)
            requested = self._redactor.json(details.requested, secrets)
            placeholder = int(self._renderer.encode("*")[-1])
            return Redaction(tokens, size, placeholder, requested)

        return await offload([ids.tolist(), details.requested], find)

    def forget(self, episode_id: str) -> None:
        """Drop a closed episode's tree from memory."""
        self._trees.pop(episode_id, None)

    def _forget(self, episode_id: str, episode: EpisodeTree) -> None:
        if self._trees.get(episode_id) is episode:
            del self._trees[episode_id]

    async def _episode_tree(self, episode_id: str, *, reload: bool = True) -> EpisodeTree:
        """Return the episode's tree; a fresh one has what other processes have added to it."""
        known = True
        if (
            reload and self._exclusivity is not None
        ):  # before the tree is read, so that no later turn is missed
            known = await self._exclusivity.serves_exclusively(episode_id)
        while episode := self._trees.get(episode_id):
            if not known:
                await self._refresh(episode_id, episode)
            if self._trees.get(episode_id) is episode:
                return episode
        nodes, calls = await self._database.read(
            lambda c: (
                turns.nodes(c, self._model, [episode_id])[episode_id],
                turns.calls(c, episode_id, self._model),
            )
        )
        if episode := self._trees.get(episode_id):  # another call may have loaded it first
            return episode
        episode = EpisodeTree(TokenTree())
        episode.add_stored(nodes, calls)
        self._trees[episode_id] = episode
        return episode

    async def _refresh(self, episode_id: str, episode: EpisodeTree) -> None:
        """Add what other processes have committed since, once the turns of this process are committed."""
        while episode.pending:
            await self._database.settled()
        known = len(episode.tree.nodes)

        def read(connection: Connection) -> tuple[list[Node], list[CallRecord]]:
            nodes = turns.nodes_since(connection, self._model, episode_id, known)
            return nodes, turns.calls_since(connection, self._model, episode_id, known) if nodes else []

        nodes, calls = await self._database.read(read)
        unchanged = len(episode.tree.nodes) == known and not (episode.pending or episode.broken)
        if nodes and unchanged:
            episode.add_stored(nodes, calls)

    @staticmethod
    def _nodes(tree: TokenTree, prompt: Prompt, turn: Turn, details: TurnDetails) -> list[Node]:
        place = tree.find(keyed(prompt.ids, prompt.images), prompt.after)
        rest = prompt.ids[place.length :]
        images = tuple(
            image._replace(offset=image.offset - place.length)
            for image in prompt.images
            if image.offset >= place.length
        )
        nodes: list[Node] = []
        index, parent, at = len(tree.nodes), place.node, place.at
        if len(rest):
            empty = _EMPTY_LOGPROBS, _EMPTY_IDS, _EMPTY_FLAGS
            nodes.append(Node(index, parent, at, False, rest, *empty, images=images))
            index, parent, at = index + 1, index, len(rest)
        nodes.append(_turn_node(index, parent, at, turn, details))
        return nodes

    def _call_row(
        self, episode_id: str, node: int, prompt: Prompt, turn: Turn, details: TurnDetails, digest: bytes
    ) -> CallRecord:
        used = details.used
        return {
            "id": turn.call_id,
            "episode_id": episode_id,
            "model": self._model,
            "node": node,
            "request_key": details.request_key,
            "api": details.api,
            "stream": details.stream,
            "requested": details.requested,
            "used": {
                "temperature": used.temperature,
                "top_p": used.top_p,
                "max_tokens": used.max_tokens,
                "seed": used.seed,
                **({"min_tokens": used.min_tokens} if used.min_tokens else {}),
                "bridged": prompt.bridged,
                **({"switches": prompt.switches.variables} if prompt.switches else {}),
            },
            "logprobs_mode": LOGPROBS_MODE,
            "engine": turn.engine,
            "finish_reason": details.finish_reason,
            "prompt_tokens": len(prompt.ids),
            "completion_tokens": len(turn.ids),
            "pauses": turn.pauses,
            "digest": digest,
            "tool_faults": ",".join(details.tool_faults) or None,
            "received_at": details.received_at,
            "queued_s": details.queued_s,
            "first_token_s": details.first_token_s,
            "seconds": time.time() - details.received_at if details.seconds is None else details.seconds,
        }


def _array(ids: Sequence[int]) -> Int32Array:
    """Return ids as an array, converted in pieces: a long list in one piece keeps Python's lock from the event loop."""
    parts = [np.asarray(ids[start : start + _PART], np.int32) for start in range(0, len(ids), _PART)]
    return np.concatenate(parts) if parts else _EMPTY_IDS


class _TreeChanged(Exception):
    """Another process has put nodes where these were to be."""


def _insert(connection: Connection, made: Sequence[tuple[EpisodeTree, tuple[turns.Turn, float]]]) -> None:
    """Store turns whose episodes other processes may write to. Runs in the writer's thread, in the order of submission.

    If one of several fails, nothing is stored, and each is written alone (`Committer.commit`): that finds the broken tree.
    """
    try:
        if any(episode.broken for episode, _ in made):
            raise _TreeChanged
        turns.insert_shared_turns(connection, [turn for _, turn in made])
    except Exception as error:
        if len(made) == 1:
            made[0][0].broken = True
        if isinstance(error, IntegrityError):
            raise _TreeChanged from error
        raise


def _turn_node(index: int, parent: int, at: int, turn: Turn, details: TurnDetails) -> Node:
    logprobs = np.asarray(turn.logprobs, np.float32)
    counts = [span.count for span in turn.spans]

    def per_token(values: list[int], dtype: type) -> Any:
        if len(counts) == 1:
            return np.full(counts[0], values[0], dtype)
        return np.repeat(np.asarray(values, dtype), counts)

    used = int(details.used.flags())
    flags = per_token([used | _span_flags(span) for span in turn.spans], np.uint8)
    unusable = ~(logprobs > UNUSABLE_LOGPROB)
    if unusable.any():
        flags[unusable] |= int(TokenFlag.INVALID_LOGPROB)
    kept = Kept.of(turn.kept, len(turn.ids)) if turn.kept else None
    if kept is not None:
        flags[kept.known] &= ~np.uint8(TokenFlag.TRUNCATED)
    unconfirmed = any(not span.confirmed for span in turn.spans)
    return Node(
        index=index,
        parent=parent,
        at=at,
        sampled=True,
        ids=np.asarray(turn.ids, np.int32),
        logprobs=logprobs,
        versions=per_token([span.version for span in turn.spans], np.int32),
        flags=flags,
        temperature=details.used.temperature,
        mask_reason=details.mask_reason or ("unconfirmed_version" if turn.disputed else ""),
        call_id=turn.call_id,
        finish_reason=details.finish_reason,
        newest=per_token([span.newest for span in turn.spans], np.int32) if unconfirmed else None,
        kept=kept,
    )


def _span_flags(span: Span) -> int:
    return int(TokenFlag.NONE if span.confirmed else TokenFlag.UNCONFIRMED)
