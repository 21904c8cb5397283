"""The scripted engine's replies: a pure function of the conversation, and of the grammar that constrains the reply, if any.

Foreign programs ask what they like, in any order and in parallel, so there is no list of replies. In order of precedence:
1. a script in the conversation: the k-th reply after a message with lines `SCRIPT: ...` is the k-th of these lines; a line is
   text, or `NAME {json}`, a call of a tool, in which `<<PATTERN>>` stands for what the pattern's group finds in the prompt. A
   request with no tools (for a title, a summary) that quotes a script gets text;
2. a grammar: a small instance of it;
3. after a tool's result: a call of the tool that ends the work (`final_answer`, `submit`), if there is one, else text that holds
   the result;
4. tools that the user's words name: a call of each;
5. text: a haiku, a count, or a short response.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.compat.instances import Words, instance

Spelled = Callable[[int], str]
"""The text of a token."""
FINISHING = ("final_answer", "submit", "final_result")
HAIKU = "Water at the gate,\nheld back while the wheel is changed,\nthen it runs again."
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|$)", re.DOTALL)
_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_SCRIPT = re.compile(r"SCRIPT: ?(.*)")
_CALL = re.compile(r"([\w.-]+) (\{.*\})$")
_FOUND = re.compile(r"<<(.*?)>>")
_COUNT = re.compile(r"count (?:from \w+ )?to (\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Turn:
    """One message, as Qwen's template wrote it."""

    role: str
    text: str

    @property
    def results(self) -> list[str]:
        """The tools' responses; such a message has the role of a user."""
        return _RESULT.findall(self.text) if self.role == "user" else []


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt, read back."""

    turns: list[Turn]
    tools: list[dict[str, Any]] = field(default_factory=list)
    """The functions: name, description, parameters."""

    @classmethod
    def read(cls, prompt: str) -> Conversation:
        """A prompt without the template's marks is one message of a user."""
        turns = [Turn(role, text) for role, text in _TURN.findall(prompt)]
        if turns and turns[-1].role == "assistant":
            turns.pop()  # the reply that is to be sampled
        if not turns:
            return cls([Turn("user", prompt)])
        found = _TOOLS.search(turns[0].text) if turns[0].role == "system" else None
        tools = [json.loads(line) for line in found[1].splitlines()] if found else []
        return cls(turns, [tool.get("function", tool) for tool in tools])

    @property
    def request(self) -> str:
        """The words of the last message that a user wrote."""
        return next((t.text for t in reversed(self.turns) if t.role == "user" and not t.results), "")

    @property
    def results(self) -> list[str]:
        """The tools' responses since the last reply."""
        return self.turns[-1].results

    def tool(self, name: str) -> dict[str, Any] | None:
        """A function by its name."""
        return next((tool for tool in self.tools if tool["name"] == name), None)


def reply(prompt: str, held_to: dict[str, Any] | None = None, spelled: Spelled = str) -> str:
    """The text of a reply to a rendered prompt, tool marks included.

    `held_to`: vLLM's `structured_outputs`; `spelled` returns the text of a token id in it.
    """
    talk = Conversation.read(prompt)
    scripted = _scripted(talk, prompt)
    if scripted is not None:
        return scripted
    words = Words(talk.request, talk.results)
    if held_to:
        return _held(talk, held_to, words, spelled)
    if talk.results:
        return _after_results(talk, words)
    called = _named(talk)
    if called:
        return "\n".join(call(tool["name"], instance(tool.get("parameters") or {}, words)) for tool in called)
    return _text(talk.request)


def call(name: str, arguments: Any) -> str:
    """A tool call, as Qwen's template writes it."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def _scripted(talk: Conversation, prompt: str) -> str | None:
    for at, turn in enumerate(talk.turns):
        lines = _SCRIPT.findall(turn.text) if turn.role == "user" else []
        if lines:
            replies = sum(later.role == "assistant" for later in talk.turns[at:])
            line = lines[min(replies, len(lines) - 1)].strip()
            found = _CALL.match(line)
            if found and not talk.tools:
                return None
            return call(found[1], json.loads(_filled(found[2], prompt))) if found else line
    return None


def _filled(arguments: str, prompt: str) -> str:
    """Raise ValueError where the prompt has nothing that a pattern finds."""

    def lookup(pattern: re.Match[str]) -> str:
        found = re.search(pattern[1], prompt)
        if not found:
            raise ValueError(f"{pattern[1]!r} is not in the prompt")
        return found[1]

    return _FOUND.sub(lookup, arguments)


def _after_results(talk: Conversation, words: Words) -> str:
    for name in FINISHING:
        tool = talk.tool(name)
        if tool is not None:
            return call(name, instance(tool.get("parameters") or {}, words))
    return f"The answer is {' and '.join(talk.results)}."


def _named(talk: Conversation) -> list[dict[str, Any]]:
    """The tools whose whole names the user's words hold, else the one with most of whose name they hold."""
    request = talk.request.lower()
    whole = [tool for tool in talk.tools if re.search(rf"\b{re.escape(tool['name'].lower())}\b", request)]
    if whole:
        return whole
    scores = [(_overlap(tool["name"], request), tool) for tool in talk.tools]
    best = max(scores, key=lambda pair: pair[0], default=(0, None))
    return [best[1]] if best[1] is not None and best[0] > 0 else []


def _overlap(name: str, request: str) -> int:
    parts = {
        part.lower() for part in re.findall(r"[A-Za-z][a-z]+|\w+", name.replace("_", " ")) if len(part) > 3
    }
    return sum(part in request for part in parts)


def _text(request: str) -> str:
    low = request.lower()
    counted = _COUNT.search(request)
    if counted:
        text = ", ".join(str(i) for i in range(1, min(int(counted[1]), 200) + 1))
    elif "haiku" in low:
        text = HAIKU
    elif "unicode" in low:
        text = "Grüße, 世界! 🌍"
    else:
        text = "Hello from the scripted engine."
    return f"<think>\nLet me see.\n</think>\n\n{text}" if "think aloud" in low else text


# Replies that a grammar holds


def _held(talk: Conversation, held_to: dict[str, Any], words: Words, spelled: Spelled) -> str:
    if "json" in held_to:
        return json.dumps(instance(_loaded(held_to["json"]), words), ensure_ascii=False)
    if "structural_tag" in held_to:
        return _tagged(_loaded(held_to["structural_tag"])["format"], talk, words, spelled)
    raise ValueError(f"the scripted engine knows no instance of {sorted(held_to)}")


def _loaded(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _tagged(form: dict[str, Any], talk: Conversation, words: Words, spelled: Spelled) -> str:
    """An instance of a structural tag (xgrammar's form). Of several, the one that the conversation is about."""
    match form["type"]:
        case "const_string":
            return str(form["value"])
        case "token":
            return spelled(form["token"])
        case "json_schema":
            return json.dumps(instance(form["json_schema"], words), ensure_ascii=False)
        case "sequence":
            return "".join(_tagged(part, talk, words, spelled) for part in form["elements"])
        case "or":
            return _tagged(_chosen(form["elements"], talk), talk, words, spelled)
        case "star" | "any_tokens" | "any_text":
            return ""
        case "regex" if form["pattern"] == "\\n{0,2}":
            return "\n\n"
        case kind:
            raise ValueError(f"the scripted engine knows no instance of the structural tag {kind!r}: {form}")


def _chosen(forms: list[dict[str, Any]], talk: Conversation) -> dict[str, Any]:
    """The form that names the tool that comes next; else plain JSON, if that is allowed; else the first."""
    if talk.results or "Observation" in talk.turns[-1].text:
        names = [name for name in FINISHING if talk.tool(name)]
    else:
        names = [tool["name"] for tool in _named(talk)]
    written = [(json.dumps(form), form) for form in forms]
    named = (form for name in names for text, form in written if name in text)
    plain = (form for form in forms if form["type"] == "json_schema")
    return next(named, None) or next(plain, None) or forms[0]
