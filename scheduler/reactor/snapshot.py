"""The state of a program between two tags, as text: what its reactors keep, and what they have scheduled.

State is whatever a reactor keeps in attributes of its own, so a new attribute cannot be forgotten. It is pickled, because one
state may be a million values while the gateway waits, and values of a reactor refer to each other. Elements are written by their
paths. Only classes of `Program.state_packages` and of the reactors' own modules are read back: a file can run no other code.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections import deque
from typing import Any

from scheduler.reactor.clock import Tag
from scheduler.reactor.elements import Element, Source
from scheduler.reactor.topology import Program, Reactor

Pending = list[tuple[Tag, Source[Any], Any]]
"""What is scheduled: its tag, its source and its value, in order."""
_STRUCTURE = frozenset(vars(Reactor("structure")))
_PLAIN = {(cls.__module__, cls.__name__): cls for cls in (deque, Tag)}


class BadState(Exception):
    """The text is not a state of this program."""


def state_text(program: Program, pending: Pending) -> str:
    """Return the state of a program that runs no tag at the moment."""
    states = {
        reactor.name: {name: value for name, value in vars(reactor).items() if name not in _STRUCTURE}
        for reactor in program.reactors
    }
    file = io.BytesIO()
    _Writer(file, protocol=5).dump((states, pending))
    return base64.b64encode(file.getvalue()).decode()


def restore(program: Program, text: str) -> Pending:
    """Give a new program the state of another one like it; return what is scheduled. Raise BadState."""
    try:
        pending: Pending
        states, pending = _Reader(program, base64.b64decode(text)).load()
        for reactor in program.reactors:
            vars(reactor).update(states[reactor.name])
    except Exception as error:  # a pickle may raise anything
        raise BadState(f"its state does not fit: {error!r}") from error
    return pending


class _Writer(pickle.Pickler):
    def persistent_id(self, value: Any) -> str | None:
        return value.path if isinstance(value, Element) else None


class _Reader(pickle.Unpickler):
    def __init__(self, program: Program, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._elements = program.elements
        self._modules = {type(reactor).__module__ for reactor in program.reactors}
        self._packages = tuple(f"{package}." for package in program.state_packages)

    def persistent_load(self, path: str) -> Element[Any]:
        return self._elements[path]

    def find_class(self, module: str, name: str) -> Any:
        if (plain := _PLAIN.get((module, name))) is not None:
            return plain
        if module in self._modules or module.startswith(self._packages):
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is not a state")
