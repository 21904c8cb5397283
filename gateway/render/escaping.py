"""Messages for renderers that mix their own text with their input before they encode it. Pure computation.

Text from outside that spells a control token is cut (`ControlTokens.cut_up`), and the tokenizer removes the cuts. Operations of
the renderer on such text, such as a search for `</think>`, must behave as if there were no cuts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway.render.special_tokens import ControlTokens


class Quoted(str):
    """A text with cuts; words that are searched for in it are cut in the same way, and its parts are `Quoted` too."""

    control: ControlTokens

    def __new__(cls, cut: str, control: ControlTokens) -> Quoted:
        quoted = super().__new__(cls, cut)
        quoted.control = control
        return quoted


def quoted(value: Any, control: ControlTokens) -> Any:
    """Return a JSON value with every text in it, keys too, that spells a control token as `Quoted`; types are kept."""

    def change(text: str) -> str:
        found = control.cut_up(text)
        return Quoted(found, control) if found != text else text

    return _changed(value, change)


def cut(value: Any, control: ControlTokens) -> Any:
    """Return a JSON value with every text in it, keys too, cut where it spells a control token; types are kept."""
    return _changed(value, control.cut_up)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return type(value)({_changed(key, change): _changed(item, change) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return type(value)([_changed(item, change) for item in value])
    return value


def _keeping_parts(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of `str` that takes words as they are and returns parts that are `Quoted`."""

    def changed(self: Quoted, *args: Any) -> Any:
        return _parts(method(self, *(_words(arg, self.control) for arg in args)), self.control)

    return changed


def _words(value: Any, control: ControlTokens) -> Any:
    if isinstance(value, tuple):
        return tuple(_words(item, control) for item in value)
    return control.cut_words(value) if isinstance(value, str) and not isinstance(value, Quoted) else value


def _parts(value: Any, control: ControlTokens) -> Any:
    if isinstance(value, str):
        return Quoted(value, control)
    if isinstance(value, list | tuple):
        return type(value)(_parts(item, control) for item in value)
    return value


for _name in (
    *("__contains__", "startswith", "endswith", "find", "rfind", "index", "count", "replace"),
    *("split", "rsplit", "splitlines", "partition", "rpartition"),
    *("strip", "lstrip", "rstrip", "removeprefix", "removesuffix"),
):
    setattr(Quoted, _name, _keeping_parts(getattr(str, _name)))
