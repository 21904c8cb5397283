"""Draws a sealed program from its declarations: its reactors as Mermaid's flowchart, and its reactions as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from scheduler.reactor.clock import MILLISECOND, SECOND
from scheduler.reactor.elements import Connection, Element, PhysicalAction
from scheduler.reactor.topology import Program, Reactor

_LABEL_LINE = 3
"""The number of names in a line of an edge's label."""


def duration(ns: int) -> str:
    """`2 s`, `250 ms`, or nanoseconds where neither is exact."""
    if ns % SECOND == 0:
        return f"{ns // SECOND} s"
    if ns % MILLISECOND == 0:
        return f"{ns // MILLISECOND} ms"
    return f"{ns} ns"


def mermaid(program: Program) -> str:
    """Return the flowchart: physical actions come from outside, connections carry values from port to port, dotted if delayed."""
    lines = ["flowchart LR", "  outside([events from outside])"]
    lines += [f"  {reactor.name}[{reactor.name}]" for reactor in program.reactors]
    for reactor in program.reactors:
        if events := _physical(reactor):
            lines.append(f'  outside -->|"{_label(event.name for event in events)}"| {reactor.name}')
    for (source, target, after), links in _bundles(program.connections).items():
        names = _label(_carried(link) for link in links)
        if after is None:
            lines.append(f'  {source} ==>|"{names}"| {target}')
        else:
            lines.append(f'  {source} -.->|"{names}<br/>({_delay(after)})"| {target}')
    return "\n".join(lines) + "\n"


def markdown(program: Program) -> str:
    """Return a page with the flowchart and, for every reactor, a table of its reactions in their order."""
    parts = [
        f"# The program `{program.name}`",
        "`scheduler graph` writes this page. Thick arrows carry values at the same logical time, dotted ones later. At each\n"
        "logical time the triggered reactions run level by level. In the tables, events from outside are **bold**, and events\n"
        "that a reactor schedules for itself are *slanted*.",
        f"```mermaid\n{mermaid(program)}```",
    ]
    for reactor in program.reactors:
        parts += [f"## {reactor.name}", "\n".join(_table(reactor))]
    return "\n\n".join(parts) + "\n"


def _table(reactor: Reactor) -> Iterator[str]:
    yield "| level | reaction | runs on | writes |"
    yield "|---|---|---|---|"
    for reaction in reactor.reactions:
        yield f"| {reaction.level} | `{reaction.name}` | {_listed(reaction.on)} | {_listed(reaction.writes)} |"


def _listed(elements: Iterable[Element[Any]]) -> str:
    marks = {"physical": "**", "logical": "*"}
    return ", ".join(f"{(mark := marks.get(e.kind, ''))}{e.name}{mark}" for e in elements) or "-"


def _physical(reactor: Reactor) -> list[Element[Any]]:
    return [element for element in reactor.elements.values() if isinstance(element, PhysicalAction)]


def _bundles(connections: Iterable[Connection]) -> dict[tuple[str, str, int | None], list[Connection]]:
    """Return connections between the same two reactors with the same delay."""
    found: dict[tuple[str, str, int | None], list[Connection]] = {}
    for link in connections:
        found.setdefault((link.source.reactor, link.target.reactor, link.after), []).append(link)
    return found


def _carried(link: Connection) -> str:
    source, target = link.source.name, link.target.name
    return source if source == target else f"{source} to {target}"


def _label(names: Iterable[str]) -> str:
    listed = list(names)
    lines = [listed[at : at + _LABEL_LINE] for at in range(0, len(listed), _LABEL_LINE)]
    return ",<br/>".join(", ".join(line) for line in lines)


def _delay(after: int) -> str:
    return f"after {duration(after)}" if after else "next microstep"
