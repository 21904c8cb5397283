"""Finds the tokens that a template appends to a reply when the conversation continues, without rendering the conversation again.

Two implementations of `Bridge`: `TemplateBridge` asks any jinja template, `LibraryBridge` the `renderers` library. The result is
the ids after the recorded ones, or None if the template would have written the recorded ones differently (dropped thinking,
system messages that move, merged tool results): then the call is a branch.

Why this is exact: the template renders short conversations (witnesses) whose last reply consists of words that occur nowhere
else, followed by the real new messages. If that text begins with the witness's own prompt and the reply as a model writes it,
then the template only appended, and the rest of the text is the result. It must be the same after every witness, so it cannot
depend on the conversation's length, its system message, or earlier tool calls. The result begins with the token that closes a
turn, a single token of the vocabulary, so it can be encoded on its own.

New messages of the assistant were never sampled: a note of the agent's program in the model's name, or an edited reply. They are
appended as all others are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from gateway.render.escaping import quoted
from gateway.render.recorded import Recorded
from gateway.render.special_tokens import ControlTokens
from gateway.render.template import ChatTemplate, Message, Tool
from headgate.types import Int32Array

TAIL = 256
"""Ids of a prompt that the library is shown: enough for the beginning of a reply that the template writes."""

TEXT, THINKING, TOOL, ARGUMENT = "headgatesaid", "headgatethought", "headgatenamed", "headgateargued"
USER, ORDERED, FOUND, BEFORE = "headgateasked", "headgateordered", "headgatefound", "headgatebefore"
_WORDS = (TEXT, THINKING, TOOL, ARGUMENT, USER, ORDERED, FOUND, BEFORE)
"""The whole text of witnesses: none of it may be in a reply."""


class Bridge(Protocol):
    """Finds what follows a recorded reply."""

    def extend(
        self,
        history: Int32Array,
        sampled_from: int,
        turn: Recorded,
        new: Sequence[Message],
        tools: Sequence[Tool],
        *,
        system: bool,
    ) -> list[int] | None:
        """Return the ids to append to `history` for `new` and the beginning of a reply; None: the template rewrites history."""
        ...


class TemplateBridge:
    """The bridge of any jinja template. Holds no state apart from its parameters."""

    def __init__(
        self,
        template: ChatTemplate,
        encode: Callable[[str], list[int]],
        encode_guarded: Callable[[str], list[int]],
        control: ControlTokens,
        stop: dict[int, str],
        think: tuple[str, str] | None,
    ) -> None:
        """`encode_guarded`: of texts whose own control tokens are guarded. `stop`: the tokens that end a reply, with their
        text. `think`: the marks of reasoning."""
        self._template = template
        self._encode = encode
        self._encode_guarded = encode_guarded
        self._control = control
        self._stop = stop
        self._closes = re.compile(
            "|".join(re.escape(s) for s in sorted(stop.values(), key=len, reverse=True))
        )
        self._think = think

    def extend(
        self,
        history: Int32Array,
        sampled_from: int,
        turn: Recorded,
        new: Sequence[Message],
        tools: Sequence[Tool],
        *,
        system: bool,
    ) -> list[int] | None:
        """Encode only what is appended."""
        if not self._stop or turn.thinking == "open" or _may_merge(turn, new):
            return None
        rest = self._rest(turn, new, tools, system)
        if rest is None:
            return None
        ids = self._ids(rest, tools) if self._control.spelled_in(new, tools) else self._encode(rest.text)
        if turn.closed_by is None:
            return ids
        return ids[1:] if ids and ids[0] == turn.closed_by else None

    def _ids(self, rest: _Rest, tools: Sequence[Tool]) -> list[int]:
        """Return the token ids of the text after a reply, where new messages spell control tokens."""
        guarded = self._template.guarded(rest.messages, tools, rest.rendered)
        return self._encode_guarded(self._control.tail(guarded, len(rest.text)))

    def _rest(
        self, turn: Recorded, new: Sequence[Message], tools: Sequence[Tool], system: bool
    ) -> _Rest | None:
        """Return the text from the token that closes the reply on, if all witnesses agree on it."""
        calls = turn.calls or new[0]["role"] == "tool"
        has_text = not calls or (turn.has_text and not (turn.bare and new[0]["role"] == "tool"))
        reply = _reply(turn, new, calls, has_text)
        rest: _Rest | None = None
        for witness in _witnesses(turn, system):
            try:
                before = self._template.text(witness, tools)
            except Exception:  # the template refuses such a conversation, so the recorded one is none
                continue
            try:
                after = self._template.text([*witness, reply, *new], tools)
            except Exception:  # it refuses the new messages: the full rendering reports how
                return None
            text = self._after_reply(before, after, turn, calls, has_text)
            if text is None or (rest is not None and rest.text != text):
                return None
            rest = _Rest(text, after, [*witness, reply, *new])
        return rest

    def _after_reply(
        self, before: str, after: str, turn: Recorded, calls: bool, has_text: bool
    ) -> str | None:
        if not after.startswith(before):
            return None
        match = re.compile(self._pattern(turn, calls, has_text), re.DOTALL).match(after, len(before))
        if match is None:
            return None
        close = self._closes.search(after, match.end())
        if close is None or (not calls and after[match.end() : close.start()].strip()):
            return None
        rest = after[close.start() :]
        return None if any(word in rest for word in _WORDS) else rest

    def _pattern(self, turn: Recorded, calls: bool, has_text: bool) -> str:
        """Return the reply as a model writes it; whitespace is the model's own, so any will do."""
        thinking = ""
        if turn.thinking != "none" and self._think is not None:
            start, end = map(re.escape, self._think)
            thought = THINKING if turn.thinking == "some" else ""
            thinking = rf"{'' if turn.prompt_opened else start}\s*{thought}\s*{end}\s*"
        text = TEXT if has_text else ""
        called = rf"(?:(?!{THINKING}|{TEXT}).)*{ARGUMENT}" if calls else ""
        return rf"\s*{thinking}{text}{called}"


class _Rest(NamedTuple):
    """The text that a template writes after a reply."""

    text: str
    rendered: str
    """The whole conversation of one witness as the template writes it; `messages` are its messages."""
    messages: list[Message]


def _may_merge(turn: Recorded, new: Sequence[Message]) -> bool:
    """Return true if a template may write the first new message into the turn of the reply, where no witness shows it."""
    return bool(new) and new[0]["role"] == "assistant" and (turn.calls or turn.bare)


def _reply(turn: Recorded, new: Sequence[Message], calls: bool, has_text: bool) -> Message:
    """Return a reply of the same structure as the recorded one, in words that occur nowhere else."""
    reply: Message = {"role": "assistant", "content": TEXT if has_text else ""}
    if turn.thinking in ("some", "empty"):
        reply["reasoning_content"] = THINKING if turn.thinking == "some" else ""
    if calls:
        results = []
        for message in new:
            if message["role"] != "tool":
                break
            results.append(message)
        reply["tool_calls"] = [
            _call(r.get("tool_call_id") or f"call0000{i}") for i, r in enumerate(results or [{}])
        ]
    return reply


def _call(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": TOOL, "arguments": {"a": ARGUMENT}}}


def _witnesses(turn: Recorded, system: bool) -> Iterator[list[Message]]:
    """Short conversations that end where a reply begins, of every structure that the recorded one may have."""
    user: Message = {"role": "user", "content": USER}
    called: Message = {"role": "assistant", "content": "", "tool_calls": [_call("call00009")]}
    result: Message = {"role": "tool", "content": FOUND, "tool_call_id": "call00009", "name": TOOL}
    if turn.thought_before:
        yield [user, {**called, "reasoning_content": BEFORE}, result]
        yield [user, {"role": "assistant", "content": BEFORE, "reasoning_content": BEFORE}, user]
        return
    yield [user]
    if system:
        yield [{"role": "system", "content": ORDERED}, user, {"role": "assistant", "content": BEFORE}, user]
    else:
        yield [user, {"role": "assistant", "content": BEFORE}, user]
    if turn.called_before:
        yield [user, called, result]
        yield [user, called, result, {"role": "assistant", "content": BEFORE}, user]


def closed_by(role: str) -> list[Message]:
    """Return a conversation whose reply is followed by a message of a role: it shows how the template closes a reply."""
    reply: Message = {"role": "assistant", "content": TEXT if role != "tool" else ""}
    if role == "tool":
        reply["tool_calls"] = [_call("call00000")]
    new: Message = {"role": role, "content": "n", "tool_call_id": "call00000", "name": TOOL}
    return [{"role": "user", "content": "u"}, reply, new]


class LibraryBridge:
    """The bridge of a family that the `renderers` library knows by name.

    The library is trusted with a kind of conversation (the roles after the reply, its thinking, whether it was closed, whether
    there are tools) only after its bridge matched its own full rendering once for that kind. It gets the sampled turn and the
    last tokens of the prompt.
    """

    def __init__(
        self,
        renderer: Any,
        keeping: Any | None,
        control: ControlTokens,
        stop: frozenset[int],
        decode: Callable[[list[int]], str],
        think: tuple[str, str] | None,
    ) -> None:
        """Bridge `renderer`. `keeping`: the same renderer, configured to keep all thinking; used where there is none to drop."""
        self._renderer = renderer
        self._keeping = keeping
        self._control = control
        self._stop = stop
        self._decode = decode
        self._think_end = think[1] if think else None
        self._proved: dict[tuple[Any, ...], bool] = {}

    def extend(
        self,
        history: Int32Array,
        sampled_from: int,
        turn: Recorded,
        new: Sequence[Message],
        tools: Sequence[Tool],
        *,
        system: bool,
    ) -> list[int] | None:
        if turn.thinking == "open" or _may_merge(turn, new):
            return None
        prompt = history[max(0, sampled_from - TAIL) : sampled_from].tolist()
        sampled = history[sampled_from:].tolist()
        renderer = self._renderer if turn.thought_before or self._keeping is None else self._keeping
        if any(message["role"] == "assistant" for message in new):
            return self._rest(renderer, turn, new, tools, system)
        if not self._proves(renderer, turn, new, tools):
            return None
        if self._control.spelled_in(new):
            new = quoted(new, self._control)
        return _extension(renderer, prompt, sampled, new, tools)

    def _rest(
        self, renderer: Any, turn: Recorded, new: Sequence[Message], tools: Sequence[Tool], system: bool
    ) -> list[int] | None:
        """Return the ids from the token that closes the reply on, if all witnesses agree on them: the library continues no reply
        with one that it did not see sampled."""
        calls = turn.calls or new[0]["role"] == "tool"
        reply = _reply(turn, new, calls, turn.has_text or not calls)
        new = quoted(new, self._control) if self._control.spelled_in(new) else new
        rest: list[int] | None = None
        for witness in _witnesses(turn, system):
            try:
                before, after = (
                    list(renderer.render_ids(messages, tools=list(tools) or None, add_generation_prompt=True))
                    for messages in (witness, [*witness, reply, *new])
                )
            except Exception:  # the library refuses such conversations
                return None
            end = next((i for i in range(len(before), len(after)) if after[i] in self._stop), len(after))
            text = self._decode(after[len(before) : end])
            written = calls or text.rstrip().endswith(TEXT)
            if after[: len(before)] != before or not self._is_reply(turn, text) or not written:
                return None
            if rest is not None and rest != after[end:]:
                return None
            rest = after[end:]
        if not rest or turn.closed_by is None:
            return rest or None
        return rest[1:] if rest[0] == turn.closed_by else None

    def _is_reply(self, turn: Recorded, text: str) -> bool:
        """Return true if a reply thinks as the recorded one does."""
        thought = self._think_end is not None and self._think_end in text
        return (THINKING in text) == (turn.thinking == "some") and thought == (turn.thinking != "none")

    def _proves(self, renderer: Any, turn: Recorded, new: Sequence[Message], tools: Sequence[Tool]) -> bool:
        make = (_roles(new), turn.closed_by is not None, turn.thinking, turn.has_text, bool(tools))
        key = (renderer is self._keeping, *make)
        if key not in self._proved:
            try:
                self._proved[key] = self._try(renderer, *make)
            except Exception:  # the library refuses such conversations
                self._proved[key] = False
        return self._proved[key]

    def _try(
        self, renderer: Any, roles: tuple[str, ...], closed: bool, thinking: str, has_text: bool, tools: bool
    ) -> bool:
        """Return true if the library appends to a short conversation exactly the rest of the longer one's full rendering."""
        if len(roles) > _LONGEST:
            return False
        new: list[Message] = [
            {"role": role, "content": "n", "tool_call_id": "call00000", "name": TOOL} for role in roles
        ]
        called = roles[0] == "tool"
        reply: Message = {"role": "assistant", "content": TEXT if has_text or not called else ""}
        if thinking != "none":
            reply["reasoning_content"] = THINKING if thinking == "some" else ""
        if called:
            reply["tool_calls"] = [_call("call00000")]
        known = [_TOOL] if tools else None
        user: Message = {"role": "user", "content": "u"}
        before = list(renderer.render_ids([user], tools=known, add_generation_prompt=True))
        after = list(renderer.render_ids([user, reply, *new], tools=known, add_generation_prompt=True))
        end = next(i for i in range(len(before), len(after)) if after[i] in self._stop)
        reply_text = self._decode(after[len(before) : end])
        thought = self._think_end is not None and self._think_end in reply_text
        if (THINKING in reply_text) != (thinking == "some") or thought != (thinking != "none"):
            return False
        sampled = after[len(before) : end + closed]
        return after == before + sampled + (_extension(renderer, before, sampled, new, known or []) or [])


_TOOL: Tool = {
    "type": "function",
    "function": {"name": TOOL, "description": "d", "parameters": {"type": "object", "properties": {}}},
}


_LONGEST = 8
"""More changes of role than this among new messages are not tried out."""


def _roles(new: Sequence[Message]) -> tuple[str, ...]:
    """Return the roles of new messages; three of a kind in a row are as two."""
    roles: list[str] = []
    for message in new:
        if roles[-2:] != [message["role"]] * 2:
            roles.append(message["role"])
    return tuple(roles)


def _extension(
    renderer: Any, prompt: list[int], sampled: list[int], new: Sequence[Message], tools: Sequence[Tool]
) -> list[int] | None:
    """Return the ids that the library appends; None if it changes its input."""
    rendered = renderer.bridge_to_next_turn(prompt, sampled, list(new), tools=list(tools) or None)
    if rendered is None:
        return None
    ids, given = list(rendered.token_ids), prompt + sampled
    return ids[len(given) :] if ids[: len(given)] == given else None
