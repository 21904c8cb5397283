"""Turns messages into token ids, and back, for one model family. Pure computation; no episode, no engine.

A family is one that the `renderers` library knows by name (`FAMILIES`), or `template`: the checkpoint's own jinja template, with
our bridge (`bridge`) and our tables of marks (`formats`). Loading a tokenizer reads files, so `ChatRenderer.load` is called once,
at start, from a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

from jinja2 import TemplateError

from gateway.config import ModelSettings, RenderSettings
from gateway.config.models import FAMILIES
from gateway.config.settings import ConfigError
from gateway.render import recorded
from gateway.render.bridge import ARGUMENT, TEXT, TOOL, Bridge, LibraryBridge, TemplateBridge, closed_by
from gateway.render.checkpoint import Checkpoint
from gateway.render.detokenizer import TextStream, TokenTexts
from gateway.render.encoding import encode
from gateway.render.escaping import quoted
from gateway.render.formats import THINKING, ToolCall, ToolForm, json_text, tool_form
from gateway.render.images import ImageMarks, Vision
from gateway.render.library import of_library
from gateway.render.messages import Systems, plain
from gateway.render.model_folder import check_model
from gateway.render.recorded import Marks
from gateway.render.special_tokens import ControlTokens
from gateway.render.template import ChatTemplate, Message, Tool
from gateway.render.template_options import Switches, choose_switches, combinations
from headgate.errors import BadRequest
from headgate.json_depth import MAX_SAMPLED_DEPTH, too_deep
from headgate.types import Int32Array

__all__ = ["FAMILIES", "ChatRenderer", "Marks", "Message", "Tool", "ToolCall"]


def load_renderer(name: str, model: ModelSettings, render: RenderSettings | None = None) -> ChatRenderer:
    """Return a model's renderer. Raise ConfigError where its folder has none that can be read."""
    check_model(name, model)
    try:
        return ChatRenderer.load(model, render)
    except Exception as error:  # libraries raise anything; all of it is about these files
        message = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"[models.{name}] path = {str(model.path)!r}, family = {model.family!r}: the tokenizer or its template cannot be"
            f" used: {message}"
        ) from error


class ChatRenderer:
    """One model's tokenizer and template.

    Thread-safe. It holds no state that a call changes, but for caches whose entries are always the
    same for the same key; text is encoded by the tokenizer's Rust part, whose settings (padding, truncation) are never changed
    after loading; a segmenter has a decoder of its own.
    """

    def __init__(
        self,
        tokenizer: Checkpoint,
        renderer: Any | None,
        control: ControlTokens,
        *,
        thinking: bool = True,
        keeping: Any | None = None,
        family: str = "template",
        vision: Vision | None = None,
    ) -> None:
        """Wrap `renderer` of the `renderers` library; None: the model's template. `keeping`: the same, keeping all thinking.
        `vision`: how the model's processor sees images, if it is given any.

        Raise ValueError where there is neither.
        """
        self._tokenizer = tokenizer
        self._renderer = renderer
        self.backend = tokenizer.backend_tokenizer
        """The `tokenizers.Tokenizer` beneath."""
        self._control = control
        self.vision = vision
        self._marks = ImageMarks(vision) if vision is not None else None
        self.vocabulary = len(tokenizer)
        self.family = family
        self.form = tool_form(self._knows)
        """The family's form of tool calls; None if it has none that we can read."""
        self.texts = TokenTexts(self.backend)
        self._template = ChatTemplate(tokenizer, control, thinking=thinking) if renderer is None else None
        self.think = next((pair for pair in THINKING if all(map(self._knows, pair))), None)
        """The marks around reasoning, as text."""
        self.call_example = self._write_call()
        """A tool call as the template writes it, marks included; empty where it is not in the form's own words."""
        if renderer is None and not self.call_example:
            self.form = None
        self.marks = self._make_marks()
        self._systems = Systems.accepted(lambda *given: self.decode(self._render(*given)))
        self._bridge = self._make_bridge(keeping)
        self._variants: dict[Switches, ChatRenderer] = {}

    @classmethod
    def load(cls, model: ModelSettings, render: RenderSettings | None = None) -> ChatRenderer:
        """Read the tokenizer of a checkpoint. Raise ValueError where it cannot be used."""
        assert model.path is not None
        tokenizer = Checkpoint.read(model.path)
        control = ControlTokens(tokenizer, as_text=(render or RenderSettings()).special_tokens == "text")
        renderer, keeping = of_library(tokenizer, control, model)
        vision = Vision.read(model.path) if model.images else None
        if vision is not None and renderer is not None:
            raise ValueError(
                "images = true: images are put into the checkpoint's own template: set family = 'template'"
            )
        made = cls(
            tokenizer,
            renderer,
            control,
            thinking=model.thinking,
            keeping=keeping,
            family=model.family,
            vision=vision,
        )
        made._variants = dict(
            combinations(lambda s: made._varied(s, tokenizer, model), thinking=model.thinking)
        )
        return made

    def switches(self, effort: str | None, thinking: bool | None) -> Switches:
        """Return the template options for an effort and a switch of thinking, as far as the template of this model has them."""
        return choose_switches(effort, thinking, self._variants)

    def switched(self, switches: Switches) -> ChatRenderer:
        """Return the renderer of prompts with switches that this one has chosen."""
        return self._variants[switches] if switches else self

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the prompt for a reply to `messages`, with the keys of images (`render/images.py`). Raise BadRequest if the
        template refuses them."""
        return self._guarded(lambda: self._render(self._systems.placed(plain(messages, self._marks)), tools))

    def bridge(
        self,
        history: Int32Array,
        sampled_from: int,
        new: Sequence[Message],
        tools: Sequence[Tool],
        *,
        system: bool = True,
    ) -> list[int] | None:
        """Return the ids to append to `history` (a prompt, and from `sampled_from` on the reply to it) for a reply to `new`.

        None where the template writes the recorded conversation differently now: the call is a branch. Nothing that was
        recorded is decoded and encoded again, and only `new` is encoded. `system`: the conversation may begin with a system
        message; pass False where it does not, because some templates move one.
        """
        if not new or not 0 < sampled_from <= len(history):
            return None
        turn = recorded.read(history, sampled_from, self.marks, self.decode)
        return self._guarded(
            lambda: self._bridge.extend(
                history,
                sampled_from,
                turn,
                self._systems.placed(plain(new, self._marks), begins=False),
                tools,
                system=system,
            )
        )

    def reasoning_open(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt, or its last tokens, end inside a reasoning block that the template opened for the reply."""
        return recorded.opens(list(prompt[-8:]), self.marks)

    def parse_tool_calls(self, ids: Sequence[int], tools: Sequence[Tool]) -> list[ToolCall]:
        """Return the well-formed tool calls in a run of tokens from a tool mark on; none where a part of it is not
        well-formed."""
        if self._renderer is None or self.form is None or self.form.bare:
            return self.form.parse(self._without_stop(ids)) if self.form is not None else []
        try:
            parsed = self._renderer.parse_response(list(ids), tools=list(tools) or None)
            found = [call for call in parsed.tool_calls if call.status == "ok" and call.name]
            calls = [ToolCall(call.name, json_text(call.arguments)) for call in found]
        except (RecursionError, ValueError):  # nested too deep, or a number that JSON does not have
            return []
        return [] if any(too_deep(call.arguments, MAX_SAMPLED_DEPTH) for call in calls) else calls

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, marks included."""
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        """Return a token's own bytes, which may be a part of a character."""
        return self.texts.of(token) if self.texts.independent else self.decode([token]).encode()

    @property
    def control_ids(self) -> frozenset[int]:
        """The ids of control tokens, which divide conversations."""
        return self._control.ids

    def text_stream(self) -> TextStream:
        """Return a decoder for one run of tokens."""
        return self.texts.stream()

    def encode(self, text: str) -> list[int]:
        """Return the ids of text, control tokens included and nothing added."""
        return encode(self.backend, text, False)

    def _render(self, messages: list[Message], tools: Sequence[Tool]) -> list[int]:
        spelled = self._control.spelled_in(messages, tools)
        if self._template is not None:
            text = self._template.text(messages, tools)
            if spelled:
                return self._encode_guarded(self._template.guarded(messages, tools, text))
            return self._encode_shown(text)
        assert self._renderer is not None
        if spelled:
            messages, tools = quoted(messages, self._control), quoted(tools, self._control)
        return list(
            self._renderer.render_ids(messages, tools=list(tools) or None, add_generation_prompt=True)
        )

    def _encode_shown(self, text: str) -> list[int]:
        """Return the ids of a template's text, in which images are marked."""
        return self.encode(text) if self._marks is None else self._marks.encode(text, self.encode)

    def _encode_guarded(self, text: str) -> list[int]:
        """Return the same of a text in which the control tokens that count are guarded."""
        encode = self._control.encode
        return encode(text) if self._marks is None else self._marks.encode(text, encode)

    def _varied(self, switches: Switches, tokenizer: Checkpoint, model: ModelSettings) -> ChatRenderer | None:
        """Return the same with some switches; None if they change no prompt, or the template refuses them."""
        variant, keeping = copy(self), None
        try:
            if self._template is not None:
                variant._template = self._template.switched(switches.variables)
            else:
                variant._renderer, keeping = of_library(tokenizer, self._control, model, switches.variables)
        except Exception:  # the library does not know these switches
            return None
        before, after = self._probe_prompts(), variant._probe_prompts()
        refused = any(old is not None and new is None for old, new in zip(before, after, strict=True))
        if refused or after == before:
            return None
        variant._bridge = variant._make_bridge(keeping)
        return variant

    def _probe_prompts(self) -> list[list[int] | None]:
        """Return the prompts in which every switch shows; None where the template has no such conversations."""
        found: list[list[int] | None] = []
        for talk in _TALKS:
            try:
                found.append(self._render(talk, []))
            except Exception:  # templates raise anything
                found.append(None)
        return found

    def _without_stop(self, ids: Sequence[int]) -> str:
        return self.decode([token for token in ids if token not in self.marks.stop])

    def _knows(self, token: str) -> bool:
        return self._token_id(token) is not None

    def _token_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    @property
    def forced_form(self) -> ToolForm | None:
        """The form in which a call can be demanded of this family; None: none."""
        return self.form if self.call_example else None

    def _write_call(self) -> str:
        """Return a tool call as the template writes it, checked by parsing it back: only then do its markers identify the
        format."""
        form = self.form
        if form is None:
            return ""
        try:
            text = self.decode(self._render(closed_by("tool"), []))
        except Exception:  # the template has no tool calls
            return ""
        argued = text.find(ARGUMENT)
        start = text.rfind(form.start, 0, max(0, argued))
        if form.bare and start < 0:
            start = text.rfind('{"name"', 0, max(0, argued))
        if argued < 0 or start < 0:
            return ""
        closes = [form.end] if form.end is not None else [self.decode([i]) for i in self._stop_ids()]
        ends = [at + (len(c) if form.end else 0) for c in closes if (at := text.find(c, argued)) >= 0]
        block = text[start : min(ends)] if ends else ""
        return block if [call.name for call in form.parse(block)] == [TOOL] else ""

    def _make_marks(self) -> Marks:
        form = self.form
        think_start, think_end = map(self._token_id, self.think) if self.think else (None, None)
        return Marks(
            stop=self._stop_ids(),
            think_start=think_start,
            think_end=think_end,
            tool_start=self._token_id(form.start) if form else None,
            tool_end=self._token_id(form.end) if form and form.end else None,
            bare_calls=form is not None and form.bare,
            control=self._control.ids,
        )

    def _make_bridge(self, keeping: Any | None) -> Bridge:
        if self._template is None:
            return LibraryBridge(
                self._renderer, keeping, self._control, self.marks.stop, self.decode, self.think
            )
        stop = {token: self.decode([token]) for token in self.marks.stop}
        encode = self._encode_shown, self._encode_guarded
        return TemplateBridge(self._template, *encode, self._control, stop, self.think)

    def _stop_ids(self) -> frozenset[int]:
        """Return the library's, or: the tokenizer's end of sequence, and the tokens with which the template closes a reply."""
        if self._renderer is not None:
            return frozenset(self._renderer.get_stop_token_ids())
        end = self._tokenizer.eos_token_id
        stop = set() if end is None else {end}
        for role in ("user", "tool"):
            stop |= self._closing_token(role)
        return frozenset(stop)

    def _closing_token(self, role: str) -> set[int]:
        """Return the token that the template writes after a reply when a message of this role follows, if it is one special
        token."""
        assert self._template is not None
        messages = closed_by(role)
        try:
            text = self._template.text(messages, [])
        except Exception:  # the template refuses such conversations
            return set()
        last = ARGUMENT if role == "tool" else TEXT
        if last not in text:
            return set()
        ids = self.encode(text[text.rfind(last) + len(last) :].lstrip())
        added = self.backend.get_added_tokens_decoder()
        if role == "user":
            ids = ids[:1]
        elif self.form is not None and self.form.end is not None:
            end = self._token_id(self.form.end)
            ids = ids[ids.index(end) + 1 :] if end in ids else []
        return set([i for i in ids if i in added and added[i].special][:1])

    @staticmethod
    def _guarded(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except RecursionError as error:  # templates recurse into schemas and arguments
            message = (
                "the messages cannot be rendered: a tool's schema or a call's arguments are nested too deep"
            )
            raise BadRequest(message, code="too_deep", param="messages") from error
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError, TemplateError) as error:
            raise BadRequest(f"the messages cannot be rendered: {error}", param="messages") from error


_TALKS: list[list[Message]] = [
    [{"role": "user", "content": "u"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
]
"""Conversations in which every switch of a template shows."""
