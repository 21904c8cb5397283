"""An agent and a model that talk through a renderer, and what is recorded of it.

The model is scripted: it replies with what the family's template writes for the scripted reply (found in the template's own
rendering), so the text is the family's, and it can be made to use other tokens, to be cut off, or to think. The agent sends
back what the segmenter makes of it. Prompts are made as the recorder makes them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gateway.render.renderer import ChatRenderer, Message, Tool
from gateway.render.segmenter import Segmenter
from gateway.trajectories.conversation import digests
from gateway.trajectories.tree import TokenTree, TreePosition
from headgate.types import Int32Array, Node
from tests.families.family import Family, renderer

TOOLS: list[Tool] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"does {name}",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
        },
    }
    for name in ("look", "write_é")
]
_NO_IDS, _NO_LOGPROBS, _NO_FLAGS = np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.uint8)


@dataclass(frozen=True)
class Reply:
    """The scripted output of the model in one turn."""

    content: str = ""
    thought: str | None = None
    calls: tuple[tuple[str, str], ...] = ()
    """Names, and the `text` argument."""
    letters: bool = False
    """Sample it letter by letter: other tokens for the same text."""
    cut: float | None = None
    """Stop after this share of the tokens."""


@dataclass
class Call:
    """One call as the engine saw it."""

    prompt: Int32Array
    sampled: Int32Array
    messages: list[Message]
    bridged: bool
    place: TreePosition
    whole: list[int]
    """The full rendering of the messages."""
    canonical: bool
    """True if all replies so far are what the template writes, token by token."""
    history: Int32Array | None
    """The recorded tokens that the call continues, if its messages continue any."""


@dataclass
class Episode:
    """One agent's conversations with one model."""

    family: Family
    tools: Sequence[Tool] = ()
    tree: TokenTree = field(default_factory=TokenTree)
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.renderer: ChatRenderer = renderer(self.family.name)
        self._ends: dict[bytes, tuple[TreePosition, int, bool]] = {}
        self._heads: set[bytes] = set()

    def ask(self, messages: list[Message], reply: Reply) -> Message:
        """Make one call: prompt, sample, record. Return the message that the client gets."""
        chain = digests(messages, self.tools)
        known = next((k for k in range(len(chain) - 1, 0, -1) if chain[k] in self._ends), None)
        whole = self.renderer.render(messages, self.tools)
        prompt, bridged, history, canonical = np.asarray(whole, np.int32), False, None, True
        if known is not None:
            place, sampled_from, canonical = self._ends[chain[known]]
            history = self.tree.path(place)
            system = messages[0]["role"] == "system"
            added = self.renderer.bridge(history, sampled_from, messages[known:], self.tools, system=system)
            if added is not None:
                prompt, bridged = np.concatenate([history, np.asarray(added, np.int32)]), True
        if not bridged:
            canonical = True
        sampled, same = self._sample(messages, prompt, reply)
        end = self._record(prompt, sampled)
        reply_message = self._message(prompt, sampled)
        canonical_now = canonical and same
        self.calls.append(Call(prompt, sampled, list(messages), bridged, end, whole, canonical, history))
        self._ends[digests([*messages, reply_message], self.tools)[-1]] = (end, len(prompt), canonical_now)
        return reply_message

    def _sample(self, messages: list[Message], prompt: Int32Array, reply: Reply) -> tuple[Int32Array, bool]:
        """The reply's tokens, and whether they are what the template writes for it."""
        ids, same = self._written(messages, prompt, reply)
        if reply.letters:
            spelled = [i for token in ids for i in self._letters(token)]
            same, ids = same and spelled == ids, spelled
        if reply.cut is not None:
            ids, same = ids[: max(1, int(len(ids) * reply.cut))], False
        return np.asarray(ids, np.int32), same

    def _written(self, messages: list[Message], prompt: Int32Array, reply: Reply) -> tuple[list[int], bool]:
        render, stop = self.renderer.render, self.renderer.marks.stop
        message = _message_of(reply)
        role = "tool" if reply.calls else "user"
        follow = [
            {"role": role, "content": "x", "tool_call_id": call_id(i)}
            for i in range(max(1, len(reply.calls)))
        ]
        before = render(messages, self.tools)
        whole = render([*messages, message, *follow], self.tools)
        if whole[: len(before)] == before:
            end = next(i for i in range(len(before), len(whole)) if whole[i] in stop)
            ids = whole[len(before) : end + 1]
            text = self.renderer.decode(ids)
            if reply.thought is None or reply.thought in text:
                return ids, True
        think = self.renderer.think
        text = reply.content
        if think is not None and not self.renderer.reasoning_open(prompt[-8:].tolist()) and reply.thought:
            text = f"{think[0]}\n{reply.thought}\n{think[1]}\n\n{text}"
        elif think is not None and self.renderer.reasoning_open(prompt[-8:].tolist()):
            text = f"{reply.thought or ''}\n{think[1]}\n\n{text}"
        return [*self.renderer.encode(text), min(stop)], False

    def _letters(self, token: int) -> list[int]:
        if token in self.renderer.backend.get_added_tokens_decoder():
            return [token]
        text = self.renderer.decode([token])
        ids = [i for letter in text for i in self.renderer.encode(letter)]
        return ids if self.renderer.decode(ids) == text and "\ufffd" not in text else [token]

    def _record(self, prompt: Int32Array, sampled: Int32Array) -> TreePosition:
        place = self.tree.find(prompt)
        if place.length < len(prompt):
            place = self._hang(place, prompt[place.length :], False)
        return self._hang(place, sampled, True)

    def _hang(self, place: TreePosition, ids: Int32Array, sampled: bool) -> TreePosition:
        node = Node(
            len(self.tree.nodes), place.node, place.at, sampled, ids, _NO_LOGPROBS, _NO_IDS, _NO_FLAGS
        )
        return self.tree.add(node)

    def _message(self, prompt: Int32Array, sampled: Int32Array) -> Message:
        reasoning = self.renderer.reasoning_open(prompt[-8:].tolist())
        segmenter = Segmenter(self.renderer, reasoning=reasoning, tools=self.tools)
        message: Message = {"role": "assistant", "content": ""}
        for piece in [*segmenter.push(sampled.tolist()), *segmenter.finish()]:
            if piece.tool_call is not None:
                calls = message.setdefault("tool_calls", [])
                function = {"name": piece.tool_call.name, "arguments": piece.tool_call.arguments}
                calls.append({"id": call_id(len(calls)), "type": "function", "function": function})
            else:
                key = "reasoning_content" if piece.kind == "reasoning" else "content"
                message[key] = message.get(key, "") + piece.text
        return message


def call_id(index: int) -> str:
    """Nine letters, as Mistral wants them."""
    return f"call{index:05d}"


def results(message: Message, text: str = "ok") -> list[Message]:
    """Tool messages for a reply's calls."""
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": f"{text} {i}"}
        for i, call in enumerate(message.get("tool_calls", []))
    ]


def _message_of(reply: Reply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.thought is not None:
        message["reasoning_content"] = reply.thought
    if reply.calls:
        message["tool_calls"] = [
            {
                "id": call_id(i),
                "type": "function",
                "function": {"name": name, "arguments": json.dumps({"text": text}, ensure_ascii=False)},
            }
            for i, (name, text) in enumerate(reply.calls)
        ]
    return message
