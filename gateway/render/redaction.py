"""Finds the parts of texts that must not be stored (`[redaction]`), and replaces them by marks. Pure, but for the hook.

Owns the rules, and the hashes by which texts are compared without being kept. Invariants:
- a secret that a text has is also found where it is escaped in JSON, and in every other text that is stored with it;
- a hook that fails redacts all of the text that it was given;
- equal secrets have equal marks, and no mark can be guessed back without `[redaction] key`.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from threading import Lock
from typing import Any

import numpy as np

from gateway.config.redaction import RedactionSettings
from gateway.config.settings import ConfigError
from gateway.render.detokenizer import TextStream
from headgate.trees import BoolArray
from headgate.types import Int32Array

log = logging.getLogger(__name__)

Secrets = Mapping[str, str]
"""Texts to redact, with the name of the rule that found each."""
Span = tuple[int, int, str]
"""The beginning and the end of a secret in a text, and the name of the rule that found it."""
NO_SECRETS: Secrets = {}
PATTERNS = {
    "email": r"[\w.+\-]+@[\w\-]+(?:\.[\w\-]+)+",
    "phone": r"(?<![\w+])\+\d{1,3}(?:[ ./\-]?\(?\d{1,4}\)?){2,5}(?!\d)"
    r"|(?<![\w.\-])(?:\(\d{3}\) ?|\d{3}[ .\-])\d{3}[ .\-]\d{4}(?![\w\-])",
    "card": r"(?<![\w.])\d(?:[ \-]?\d){12,18}(?!\w)",
    "key": r"\b(?:sk-[\w\-]{16,}|hg-[\w\-]{24,}|gh[opsur]_\w{20,}|github_pat_\w{20,}|glpat-[\w\-]{16,}|xox[abeoprs]-[\w\-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w\-]{35}|hf_\w{20,}|eyJ[\w\-]{10,}\.eyJ[\w\-]{10,}\.[\w\-]{10,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)",
}
"""The expressions of `[redaction] patterns`."""
_LONG_NUMBER = 12
"""Digits from which on a number in JSON is examined as text."""
_REMEMBERED = 4096
"""Texts of which it is remembered what the hook found."""
_PREFIX = 4
"""Characters from which on the beginning of a secret at the end of a reply that was cut is redacted."""


class Redactor:
    """All rules of `[redaction]`; thread-safe."""

    def __init__(self, settings: RedactionSettings | None = None) -> None:
        """Load the hook. Raise ConfigError where there is none of that name."""
        given = settings or RedactionSettings()
        rules = {name: PATTERNS[name] for name in given.patterns} | given.rules
        self._rules = [(name, re.compile(rule)) for name, rule in rules.items()]
        self._hook = _load(given.hook) if given.hook else None
        self.active = given.active
        key = given.key.get_secret_value() if given.key and given.active else ""
        self.hash_key = hashlib.blake2b(key.encode(), digest_size=32).digest() if key else b""
        """The key of the hashes of conversations and requests; empty: nothing is redacted."""
        self._found: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()
        """What the hook found, by the digest of the text."""
        self._lock = Lock()

    def secrets(self, *values: Any) -> Secrets:
        """Return what is to be redacted in texts and in values of JSON, in whatever depth."""
        found: dict[str, str] = {}
        for value in values if self.active else ():
            for text in _texts(value):
                found |= {text[start:end]: name for start, end, name in self._matches(text)}
                found |= dict.fromkeys(self._hooked(text), "hook")
        return found

    def text(self, text: str, known: Secrets = NO_SECRETS) -> str:
        """Return a text with marks in place of secrets. `known`: those that were found elsewhere."""
        if not self.active:
            return text
        return self._replaced(text, {**known, **self.secrets(text)})

    def line(self, text: str) -> str:
        """Return a line for a log with marks in place of what patterns and rules find; without the hook, which may log."""
        return self._replaced(text, NO_SECRETS)

    def json(self, value: Any, known: Secrets = NO_SECRETS) -> Any:
        """Return a value of JSON with marks in place of secrets, in keys too."""
        if not self.active:
            return value
        known = {**known, **self.secrets(value)}
        return self._json(value, known)

    def tokens(self, ids: Int32Array, stream: TextStream, known: Secrets, reply_from: int) -> BoolArray:
        """Return which tokens have a part in a secret; shape (n,).

        `stream`: a new decoder; `known`: the secrets of the messages; the tokens from `reply_from` on were sampled, and are
        given to the hook as one text.
        """
        pieces = [stream.step(token) for token in ids.tolist()]
        rest = stream.end()
        ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        text = "".join(pieces) + rest
        reply = text[int(ends[reply_from - 1]) if reply_from else 0 :]
        known = {**known, **dict.fromkeys(self._hooked(reply), "hook")}
        mask = np.zeros(len(ids), np.bool_)
        spans = [*self._spans(text, known), *_cut(text, known)]
        if not spans:
            return mask
        starts = np.concatenate([[0], ends[:-1]])
        # Bytes of a character that is complete only with a later token: each of them has a part in it
        completed = np.where(ends > starts, ends, np.iinfo(np.int64).max)
        until = np.minimum.accumulate(completed[::-1])[::-1]
        for start, end, _ in spans:
            mask |= (starts < end) & (until > start)
        return mask

    def _replaced(self, text: str, known: Secrets) -> str:
        parts, done = [], 0
        for start, end, name in self._spans(text, known):
            parts += [text[done:start], self.mark(text[start:end], name)]
            done = end
        return "".join([*parts, text[done:]]) if parts else text

    def mark(self, secret: str, name: str) -> str:
        """Return what is stored in place of a secret."""
        tag = hashlib.blake2b(secret.strip().encode(errors="replace"), digest_size=4, key=self.hash_key)
        return f"[redacted {name} {tag.hexdigest()}]"

    def _json(self, value: Any, known: Secrets) -> Any:
        match value:
            case str():
                return self._replaced(value, known)
            case dict():
                return {self._json(name, known): self._json(item, known) for name, item in value.items()}
            case list() | tuple():
                return [self._json(item, known) for item in value]
            case int() if not isinstance(value, bool) and len(text := str(value)) >= _LONG_NUMBER:
                redacted = self._replaced(text, known)
                return value if redacted == text else redacted
        return value

    def _spans(self, text: str, known: Secrets) -> list[Span]:
        """Return the secrets in a text in order; those that overlap are one."""
        found = [*self._matches(text), *_occurrences(text, known)]
        merged: list[Span] = []
        for start, end, name in sorted(found):
            if merged and start < merged[-1][1]:
                before = merged[-1]
                merged[-1] = (before[0], max(before[1], end), before[2])
            else:
                merged.append((start, end, name))
        return merged

    def _matches(self, text: str) -> Iterator[Span]:
        for name, rule in self._rules:
            for match in rule.finditer(text):
                if match.end() > match.start() and (name != "card" or _is_card(match.group())):
                    yield (*match.span(), name)

    def _hooked(self, text: str) -> tuple[str, ...]:
        """Return what the hook finds in a text: all of it, if the hook fails."""
        if self._hook is None or not text:
            return ()
        digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest()
        with self._lock:
            if (known := self._found.get(digest)) is not None:
                return known
        try:
            returned = self._hook(text)
            if isinstance(returned, str) or not all(isinstance(part, str) for part in returned):
                raise TypeError("the hook must return a list of strings")
            found = tuple({part for part in returned if part})
        except Exception as error:  # the hook is the user's, and whatever it raises may quote the text
            log.error("[redaction] hook failed, and all of the text is redacted: %s", type(error).__name__)
            return (text,)
        with self._lock:
            self._found[digest] = found
            while len(self._found) > _REMEMBERED:
                self._found.popitem(last=False)
        return found


def _load(name: str) -> Callable[[str], Iterable[str]]:
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:
        raise ConfigError(f"[redaction] hook = {name!r}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ConfigError(f"[redaction] hook = {name!r}: there is no function {attribute} in {module}")
    found: Callable[[str], Iterable[str]] = function
    return found


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a value of JSON; of a text that is JSON itself (arguments of calls) those in it, too."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        match item:
            case str():
                yield item
                if item[:1] in ("{", "["):
                    try:
                        waiting.append(json.loads(item))
                    except (ValueError, RecursionError):
                        continue
            case dict():
                waiting += [*item, *item.values()]
            case list() | tuple():
                waiting += item
            case int() if not isinstance(item, bool) and len(str(item)) >= _LONG_NUMBER:
                yield str(item)


def _variants(secret: str) -> set[str]:
    """Return the forms in which a secret may stand in a text: as it is, trimmed by a template, escaped in JSON."""
    forms = {secret, secret.strip()}
    escaped = {json.dumps(form, ensure_ascii=ascii)[1:-1] for form in forms for ascii in (True, False)}
    twice = {json.dumps(form)[1:-1] for form in escaped}
    return {form for form in forms | escaped | twice if form}


def _occurrences(text: str, known: Secrets) -> Iterator[Span]:
    for secret, name in known.items():
        for form in _variants(secret):
            start = text.find(form)
            while start >= 0:
                yield start, start + len(form), name
                start = text.find(form, start + len(form))


def _cut(text: str, known: Secrets) -> Iterator[Span]:
    """Yield the beginning of a known secret at which a text is cut."""
    for secret, name in known.items():
        for form in _variants(secret):
            for size in range(min(len(form), len(text)) - 1, _PREFIX - 1, -1):
                if text.endswith(form[:size]):
                    yield len(text) - size, len(text), name
                    break


def _is_card(text: str) -> bool:
    """Return true if the last digit of a card's number is right (Luhn)."""
    digits = [int(character) for character in text if character.isdigit()]
    doubled = (d * 2 - 9 * (d > 4) for d in digits[-2::-2])
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0
