"""An episode's token tree, and the places in it where conversations ended: a request that continues one is found by its digest.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gateway.render.renderer import Message
from gateway.render.template_options import Switches
from gateway.store.records import CallRecord
from gateway.trajectories.conversation import tool_call_id, tool_call_ids
from gateway.trajectories.redacted import unreadable
from gateway.trajectories.tree import TokenTree, TreePosition
from headgate.types import Node


class ConversationEnd(NamedTuple):
    """The end of a conversation."""

    call_id: str
    place: TreePosition
    switches: dict[str, Any]
    """The switches with which the template wrote the prompt."""


@dataclass(slots=True)
class EpisodeTree:
    """An episode's tree, and the ends of its recorded conversations."""

    tree: TokenTree
    ends: dict[bytes, list[ConversationEnd]] = field(default_factory=dict)
    """The replies that end a conversation, by its digest, the oldest first."""
    pending: int = 0
    """Turns in the tree that are not committed yet."""
    broken: bool = False
    """The store has other nodes in these places: nothing that was built upon this tree may be stored."""

    def add_stored(self, nodes: Sequence[Node], calls: Sequence[CallRecord]) -> None:
        """Add what the store has; its calls in any order. What goes on from tokens that were redacted is rendered again."""
        places = {node.index: self.tree.add(node) for node in nodes}
        redacted = unreadable(nodes, {call["node"] for call in calls if call["used"].get("redacted")})
        for call in sorted(calls, key=lambda call: call["node"]):
            if call["digest"] and call["node"] in places and call["node"] not in redacted:
                end = ConversationEnd(call["id"], places[call["node"]], call["used"].get("switches", {}))
                self.add(call["digest"], end)

    def add(self, digest: bytes, end: ConversationEnd) -> None:
        """Index the conversation that a reply ends."""
        self.ends.setdefault(digest, []).append(end)

    def end(
        self, digest: bytes, messages: Sequence[Message], length: int, switches: Switches
    ) -> TreePosition | None:
        """Return the place where the first `length` messages end; None if the template wrote them with other switches, since it
        may write all of the conversation differently. Among equal replies it is the one whose tool calls are named, else the
        newest."""
        replies = [end for end in self.ends.get(digest, ()) if end.switches == switches.variables]
        if not replies:
            return None
        named = tool_call_ids(messages, length) if len(replies) > 1 else set()
        meant = [end.place for end in replies if tool_call_id(end.call_id, 0) in named]
        return meant[-1] if meant else replies[-1].place
