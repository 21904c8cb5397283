"""The mock engine's replies, as tokens and in the chat form that vLLM's own front end would give them.

Pure, and known to both sides: the engine sends it, and a load target compares what it receives with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from typing import Any, Literal

from bench.model import END, token_texts

Finish = Literal["stop", "length", "tool_calls"]
TOOL_TOKENS = 96
"""Tokens of a reply with a tool call; half of them are the call."""
TOOL = "look_up"
ARGUMENTS = '{"key": "headgate"}'
LOGPROB = -0.53125
"""The log-probability of every token; exact in 32 bits."""
_ABOUT = {"name": TOOL, "description": "Looks a key up."}
_PARAMETERS = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
TOOLS = [{"type": "function", "function": {**_ABOUT, "parameters": _PARAMETERS}}]
"""The tools of a request whose reply calls one."""
MESSAGES_TOOLS = [{**_ABOUT, "input_schema": _PARAMETERS}]
"""The same in Anthropic's form."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Token ids, and for each of them its delta in the chat form; None: it makes no chunk of its own."""

    ids: list[int]
    texts: list[str]
    deltas: list[dict[str, Any] | None]
    finish: Finish

    def joined(self, name: str) -> str:
        """Return all text of one field of the deltas."""
        return "".join(delta.get(name, "") for delta in self.deltas if delta)

    def message(self) -> dict[str, Any]:
        """Return the whole message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.joined("content") or None}
        if reasoning := self.joined("reasoning_content"):
            message["reasoning_content"] = reasoning
        if self.finish == "tool_calls":
            function = {"name": TOOL, "arguments": ARGUMENTS}
            message["tool_calls"] = [{"id": "call-0", "type": "function", "function": function}]
        return message


def plain(tokens: int, whole: bool) -> Reply:
    """Return a reply of `tokens` tokens of text. With `whole` the last one ends the turn; otherwise the reply is cut off."""
    ids = _text_ids(tokens - whole)
    texts = [_TEXTS[token] for token in ids]
    deltas: list[dict[str, Any] | None] = [{"content": text} for text in texts]
    if whole:
        return Reply([*ids, END], [*texts, ""], [*deltas, {"content": ""}], "stop")
    return Reply(ids, texts, deltas, "length")


def with_tool(tokens: int) -> Reply:
    """Return reasoning, a word of text and a tool call, `tokens` tokens in all. Raise ValueError if they are too few."""
    head = f'\n{{"name": "{TOOL}", "arguments": '
    parts: list[tuple[str, str]] = [("", "<think>"), ("", "\n"), ("", "</think>"), ("", "\n\n")]
    text_part = "I see. "
    call = [("", "<tool_call>"), ("", head), ("arguments", ARGUMENTS), ("", "}\n"), ("", "</tool_call>")]
    fixed = sum(len(_encode(text)) for _, text in [*parts, ("content", text_part), *call]) + 1
    if tokens < fixed + 1:
        raise ValueError(f"a reply with a tool call takes {fixed + 1} tokens")
    thought = "".join(_TEXTS[token] for token in _text_ids(tokens - fixed))
    parts[2:2] = [("reasoning_content", thought)]
    ids: list[int] = []
    deltas: list[dict[str, Any] | None] = []
    for field, text in [*parts, ("content", text_part), *call]:
        encoded = _text_ids(tokens - fixed) if field == "reasoning_content" else _encode(text)
        ids += encoded
        deltas += [_delta(field, _TEXTS[token]) for token in encoded]
    name = {"index": 0, "id": "call-0", "type": "function", "function": {"name": TOOL, "arguments": ""}}
    deltas[next(i for i, token in enumerate(ids) if _TEXTS[token] == "<tool_call>")] = {"tool_calls": [name]}
    return Reply([*ids, END], [_TEXTS[i] for i in ids] + [""], [*deltas, {}], "tool_calls")


def _delta(field: str, text: str) -> dict[str, Any] | None:
    if field == "arguments":
        return {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
    return {field: text} if field else None


def _text_ids(count: int) -> list[int]:
    """Return tokens of two letters, separated by spaces, none of them at the ends."""
    pairs = [token for token, text in _TEXTS.items() if len(text) == 2 and text.isalpha()]
    words = cycle(pairs)
    return [_IDS[" "] if i % 4 == 3 and i != count - 1 else token for i, token in zip(range(count), words)]  # noqa: B905


def _encode(text: str) -> list[int]:
    """Return the fewest tokens that make this text, the longest first."""
    ids = []
    while text:
        size = next(n for n in range(min(len(text), _LONGEST), 0, -1) if text[:n] in _IDS)
        ids.append(_IDS[text[:size]])
        text = text[size:]
    return ids


_TEXTS = token_texts()
_IDS = {text: token for token, text in _TEXTS.items()}
_LONGEST = max(map(len, _IDS))
