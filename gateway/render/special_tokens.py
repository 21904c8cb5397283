"""A vocabulary's control tokens: tokens that divide conversations, such as `<|im_end|>`, `<think>` or `[INST]`. Pure
computation.

A tokenizer makes a control token of any text that spells one, whatever its source. In the text that `ControlTokens`
encodes, each control token that the template itself wrote stands behind a guard, a random word that no text outside
knows; any other text that spells a control token is encoded as letters.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterator
from typing import Any

from gateway.render.encoding import encode
from gateway.render.formats import THINKING, TOOL_FORMS

ROLES = ("system", "user", "assistant", "tool")
"""Words from which templates put control tokens together, as in `'<|' + message.role + '|>'`."""


class ControlTokens:
    """One tokenizer's control tokens. Safe to use from several threads: nothing changes after it was made."""

    def __init__(self, tokenizer: Any, *, as_text: bool) -> None:
        """`as_text`: control tokens spelled in given text are letters. Otherwise none are looked for, and none can be guarded."""
        backend = tokenizer.backend_tokenizer
        spec = json.loads(backend.to_str())
        pieces, written = _pieces(spec["model"]), str(tokenizer.chat_template or "")
        control = [token for token in spec["added_tokens"] if _is_control(token, pieces, written)]
        self.texts = frozenset(token["content"] for token in control)
        self.ids = frozenset(token["id"] for token in control)
        self.as_text = as_text
        nonce = secrets.token_hex(8)
        self.guard = f"{nonce}g"
        """The guard, which stands before a control token that counts."""
        self.cut = f"{nonce}c"
        """The cut, which stands within text that would otherwise spell a control token."""
        self.begins, self.ends = f"{nonce}b", f"{nonce}e"
        """Marks around what a template puts together: before its first part, and after its last."""
        self._patterns = _Patterns(self)
        normalized = spec["normalizer"] is not None and any(token["normalized"] for token in control)
        self._normalize = backend.normalizer.normalize_str if normalized else None
        self._guarded = _guarded(spec, {text: self.guard + text for text in self.texts}) if as_text else None

    def spelled_in(self, *values: Any) -> bool:
        """Return whether any text in JSON values spells a control token, or end with the beginning of one. False without
        `as_text`.
        """
        if not self.as_text:
            return False
        search, normalize = self._patterns.partial.search, self._normalize
        return any(
            search(text) is not None or (normalize is not None and search(normalize(text)) is not None)
            for text in _texts(values)
        )

    def encode(self, guarded: str) -> list[int]:
        """Encode a text in which the control tokens that count are guarded."""
        assert self._guarded is not None
        backend, meant = self._guarded
        found = encode(backend, guarded, False)
        return [meant.get(token, token) for token in found] if meant else found

    def guard_uncut(self, text: str) -> str:
        """Guard the control tokens of a text in which all others were cut, and remove the cuts."""
        return self._patterns.complete.sub(rf"{self.guard}\g<0>", text).replace(self.cut, "")

    def cut_up(self, text: str) -> str:
        """Cut a text so that it spells no control token, nor with what follows it; `guard_uncut` takes the cuts out."""
        return self._patterns.cuttable.sub(rf"\g<1>{self.cut}", text)

    def cut_words(self, words: str) -> str:
        """Cut words that are searched for in a text from `cut_up`, so that they are found there."""
        return self._patterns.spelled.sub(rf"\g<1>{self.cut}", words)

    def mark(self, literal: str) -> str:
        """Guard the control tokens in a template's literal, and mark those that it only begins or ends."""
        patterns = self._patterns
        head = 0 if patterns.complete.match(literal) else patterns.head(literal)
        marked = patterns.partial.sub(
            lambda found: (self.guard if found[0] in self.texts else self.begins) + found[0], literal[head:]
        )
        return literal[:head] + self.ends + marked if head else marked

    def assemble(self, rendered: str) -> str:
        """Guard the control tokens that a template put together from marked literals, if they name a role; remove the marks."""
        return self._patterns.delimiters.sub(
            "", self._patterns.assembled.sub(rf"{self.guard}\g<1>", rendered)
        )

    def plain(self, guarded: str) -> str:
        """Return a guarded text without the guards."""
        return guarded.replace(self.guard, "")

    def tail(self, guarded: str, length: int) -> str:
        """Return the end of a guarded text, `length` characters long without the guards."""
        parts = guarded.split(self.guard)
        for at in range(len(parts) - 1, -1, -1):
            if length <= len(parts[at]):
                begun = self.guard if at and length == len(parts[at]) else ""
                last = parts[at][len(parts[at]) - length :]
                return begun + self.guard.join([last, *parts[at + 1 :]])
            length -= len(parts[at])
        return guarded


class _Patterns:
    """The regular expressions by which control tokens are found."""

    def __init__(self, control: ControlTokens) -> None:
        texts = control.texts
        any_text, partial = _pattern(texts), _pattern(texts, partial=True)
        self.complete = re.compile(f"(?:{any_text})(?!{control.cut})")
        self.partial = re.compile(partial)
        self.spelled = re.compile(f"(?=(?:{any_text}))(.)", re.DOTALL)
        self.cuttable = re.compile(f"(?=(?:{partial}))(.)", re.DOTALL)
        self.delimiters = re.compile(f"{control.begins}|{control.ends}")
        named = [text for text in texts if any(role in text for role in ROLES)]
        self.assembled = re.compile(f"{control.begins}({_pattern(named)}){control.ends}")
        self._ends = {text[i:] for text in texts for i in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)

    def head(self, literal: str) -> int:
        """Return how many characters at the beginning of a text are the end of a control token."""
        lengths = range(min(len(literal), self._longest), 0, -1)
        return next((n for n in lengths if literal[:n] in self._ends), 0)


def _guarded(spec: dict[str, Any], renamed: dict[str, str]) -> tuple[Any, dict[int, int]]:
    """Return a tokenizer that knows control tokens by their new names only, and the original ids of those that it numbers
    differently."""
    from tokenizers import Tokenizer

    model = spec["model"]
    added = [
        {**token, "content": renamed.get(token["content"], token["content"])}
        for token in spec["added_tokens"]
    ]
    if isinstance(model["vocab"], dict):
        vocabulary: Any = {renamed.get(piece, piece): i for piece, i in model["vocab"].items()}
    else:
        vocabulary = [[renamed.get(piece, piece), score] for piece, score in model["vocab"]]
    model = {**model, "vocab": vocabulary}
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    made = {
        **spec,
        "added_tokens": added,
        "model": model,
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    backend = Tokenizer.from_str(json.dumps(made))
    ids = [(backend.token_to_id(token["content"]), token["id"]) for token in added]
    return backend, {found: meant for found, meant in ids if found is not None and found != meant}


def _is_control(token: dict[str, Any], pieces: Collection[str], written: str) -> bool:
    """Return special tokens are, and what the model's own vocabulary lacks or a template writes; runs of whitespace never.

    What is left is ordinary text that a vocabulary has as added tokens, such as Gemma's `<table>`.
    """
    text = token["content"]
    if not text.replace("▁", " ").strip():
        return False
    return token["special"] or text not in pieces or text in written or text in _KNOWN


_KNOWN = {mark for pair in THINKING for mark in pair} | {
    mark for form in TOOL_FORMS for mark in (form.start, form.end, *form.needs) if mark
}


def _pieces(model: dict[str, Any]) -> Collection[str]:
    vocabulary = model["vocab"]
    return vocabulary if isinstance(vocabulary, dict) else {piece for piece, _ in vocabulary}


def _pattern(words: Collection[str], *, partial: bool = False) -> str:
    """Return a regular expression that finds the longest of the words; `partial`: or the beginning of one at the end of the text.

    Words are tried letter by letter, not one after the other: vocabularies have thousands.
    """
    rests: dict[str, set[str]] = {}
    for word in sorted(words):
        if word:
            rests.setdefault(word[0], set()).add(word[1:])
    options = [re.escape(letter) + _rest(rest, partial) for letter, rest in rests.items()]
    if len(options) == 1:
        return options[0]
    return f"(?:{'|'.join(options)})" if options else "(?!)"


def _rest(rest: set[str], partial: bool) -> str:
    if rest == {""}:
        return ""
    longer = _pattern(rest, partial=partial)
    if "" in rest:
        return f"(?:{longer})?"
    return rf"(?:{longer}|\Z)" if partial else longer


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, keys too."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            left += item.keys()
            left += item.values()
        elif isinstance(item, list | tuple):
            left += item
