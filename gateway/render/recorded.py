"""Reads the reply at the end of recorded tokens: was it closed, whether it thought, had text, called tools. Pure.

numpy alone goes through whole histories; Python's work is in proportion to the last reply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from headgate.types import Int32Array

Thinking = Literal["none", "empty", "some", "open"]
_LONG = 8
"""More ids than this between two marks are a thought, whatever their text."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The token ids that divide a reply into reasoning, content and tool calls; None where a family has no such mark."""

    stop: frozenset[int]
    think_start: int | None
    think_end: int | None
    tool_start: int | None
    tool_end: int | None
    """None, although there is a `tool_start`: a call lasts until the next one, or until the reply ends."""
    bare_calls: bool = False
    """A reply that begins with `{` may be a tool call without any mark."""
    control: frozenset[int] = frozenset()
    """All control tokens of the vocabulary."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The facts about recorded tokens that a bridge needs."""

    closed_by: int | None
    """The stop token that ended the reply; None: it was cut off."""
    thinking: Thinking
    """`open`: the reply was cut off in thought, or has marks of reasoning where they mean nothing."""
    prompt_opened: bool
    """The template itself had opened the reasoning."""
    has_text: bool
    """True if there is text outside of reasoning and tool calls."""
    bare: bool
    """The text may be a tool call without a mark."""
    calls: bool
    """True if there are marked tool calls."""
    thought_before: bool
    called_before: bool
    """True if there were marked tool calls before this reply, or the family has no unambiguous marks for them."""


def read(
    history: Int32Array, sampled_from: int, marks: Marks, decode: Callable[[list[int]], str]
) -> Recorded:
    """Read a history whose last reply begins at `sampled_from`."""
    before, sampled = history[:sampled_from], history[sampled_from:].tolist()
    opened = opens(before[-8:].tolist(), marks)
    closed_by = sampled.pop() if sampled and sampled[-1] in marks.stop else None
    thinking, rest = _thinking(sampled, opened, marks, decode)
    at = rest.index(marks.tool_start) if marks.tool_start in rest else len(rest)
    text = decode(rest[:at]).strip()
    sure = marks.tool_start is not None and not marks.bare_calls
    return Recorded(
        closed_by=closed_by,
        thinking=thinking,
        prompt_opened=opened,
        has_text=bool(text),
        bare=marks.bare_calls and text.startswith("{"),
        calls=at < len(rest),
        thought_before=_thought(before, marks, decode),
        called_before=bool((before == marks.tool_start).any()) if sure else True,
    )


def opens(prompt: list[int], marks: Marks) -> bool:
    """Return whether a prompt, or its last tokens, end inside a reasoning block that the beginning of the reply opens.

    That beginning is what follows the last control token of another kind: before it are messages, which open nothing.
    """
    for token in reversed(prompt):
        if token == marks.think_start:
            return True
        if token in marks.control:
            return False
    return False


def _thinking(
    sampled: list[int], opened: bool, marks: Marks, decode: Callable[[list[int]], str]
) -> tuple[Thinking, list[int]]:
    """Return the reasoning of a reply, and the rest."""
    if marks.think_start is None or not (opened or {marks.think_start, marks.think_end} & set(sampled)):
        return "none", sampled
    start = 0
    if not opened:
        if marks.think_start not in sampled:
            return "open", sampled
        start = sampled.index(marks.think_start) + 1
        if decode(sampled[: start - 1]).strip():
            return "open", sampled
    if marks.think_end not in sampled[start:]:
        return "open", sampled
    end = sampled.index(marks.think_end, start)
    return ("some" if decode(sampled[start:end]).strip() else "empty"), sampled[end + 1 :]


def _thought(before: Int32Array, marks: Marks, decode: Callable[[list[int]], str]) -> bool:
    """Return true if any reasoning block before the reply has more than whitespace in it."""
    if marks.think_end is None:
        return False
    ends = np.flatnonzero(before == marks.think_end)
    if not len(ends):
        return False
    starts = np.flatnonzero(before == marks.think_start)
    at = np.searchsorted(starts, ends) - 1
    if (at < 0).any():
        return True
    lengths = ends - starts[at] - 1
    if (lengths > _LONG).any():
        return True
    inside = (starts[at][:, None] + 1 + np.arange(_LONG))[np.arange(_LONG) < lengths[:, None]]
    return any(decode([token]).strip() for token in np.unique(before[inside]).tolist())
