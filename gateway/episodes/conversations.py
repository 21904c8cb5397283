"""Finds the open episode that a conversation belongs to, from its messages.

Owns nothing: the store has every reply, by the digest of the conversation that ends with it. Invariants: the match is the longest
reply, sampled by a model here, with which a prefix of the messages ends; replies of closed episodes and of other agents do not
match; if several episodes match equally long and tool call ids do not distinguish them, none is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.render.offload import offload
from gateway.store import episodes as statements
from gateway.store.database import Database
from gateway.store.episodes import RecordedReply
from gateway.trajectories.conversation import digests, tool_call_id, tool_call_ids

Message = dict[str, Any]
_FEW, _MANY = 8, 256
"""Ends that one query looks up: nearly always the longest one is known, and a long conversation has many."""


@dataclass(frozen=True, slots=True)
class Match:
    """The episodes that a conversation may belong to, and the notice if it is not exactly one."""

    episodes: frozenset[str]
    notice: str


NEW = Match(frozenset(), "")
"""A conversation without any reply."""
UNKNOWN = Match(frozenset(), "unknown_conversation")


class Conversations:
    """Every conversation that an agent's key may continue."""

    def __init__(self, database: Database, key: bytes = b"") -> None:
        """`key`: that of the hashes of conversations."""
        self._database = database
        self._key = key

    async def find(self, agent: str, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Match:
        """Return the episode that has the longest recorded beginning of `messages`."""
        lengths = ends(messages)
        if not lengths:
            return NEW
        # Calls that forbid tools are recorded without any; for the other calls the tools distinguish conversations exactly.
        chains = await offload(
            (messages, tools),
            lambda: [digests(messages, some, self._key) for some in ((tools, []) if tools else ([],))],
        )
        start, count = 0, _FEW
        while start < len(lengths):
            some = lengths[start : start + count]
            wanted = [chain[length] for chain in chains for length in some]
            found = await self._database.read(lambda c: statements.replies(c, agent, wanted))  # noqa: B023
            for length in some if found else ():
                for chain in chains:
                    if replies := [reply for reply in found if reply.digest == chain[length]]:
                        return chosen(replies, messages, length)
            start, count = start + count, _MANY
        return UNKNOWN


def messages_before_reply(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages before the first reply."""
    return messages[: next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))]


def ends(messages: Sequence[Message]) -> list[int]:
    """Return the lengths of all beginnings that end in a reply, the longest first."""
    return [i + 1 for i in range(len(messages) - 1, -1, -1) if messages[i]["role"] == "assistant"]


def chosen(replies: Sequence[RecordedReply], messages: Sequence[Message], length: int) -> Match:
    """Among equal replies with which the first `length` messages end: the one whose tool calls have the ids that are named."""
    named = tool_call_ids(messages, length)
    meant = [reply for reply in replies if named & _ids_of(reply, messages[length - 1])] if named else []
    episodes = frozenset(reply.episode_id for reply in meant or replies)
    return Match(episodes, "" if len(episodes) == 1 else "ambiguous_conversation")


def _ids_of(reply: RecordedReply, message: Message) -> set[str]:
    return {tool_call_id(reply.call_id, index) for index in range(len(message.get("tool_calls") or ()))}
