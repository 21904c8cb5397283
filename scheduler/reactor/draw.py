"""Draws a sealed program from its declarations: as SVG, with a layout of its own, or as Mermaid's flowchart.

Reactors are boxes: inputs at the left edge, outputs at the right, then actions, then reactions by number. They stand in columns,
each to the right of the reactors declared before it that it hears at the same tag. A connection runs in a lane of its own:
straight into the next column, or below everything into any other. Widths are exact because the font is monospaced.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from scheduler.reactor.clock import MILLISECOND, SECOND
from scheduler.reactor.elements import Connection, Element, Input, Output, PhysicalAction, Reaction
from scheduler.reactor.topology import Program, Reactor

_BOX, _PAD, _ROW, _LINE = 390, 14, 20, 14
_LANE, _GAP, _STUB, _LABELLED = 12, 30, 18, 104
_CHARS = 54
"""The number of characters of small text that fit in a line of a box."""

_STYLE = """
  svg { --paper: #ffffff; --ink: #1f2430; --dim: #667085; --box: #f7f8fa; --edge: #c3c9d4; --wire: #2f6fdb; --late: #b3541e; }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #14171c; --ink: #e6e9ef; --dim: #98a2b3; --box: #1d2129; --edge: #414857; --wire: #7aa7f7; --late: #e39a6a; }
  }
  text { font: 12px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: var(--ink); }
  .title { font-size: 15px; font-weight: 700; } .name { font-size: 13px; font-weight: 700; }
  .dim { font-size: 10.5px; fill: var(--dim); } .late { font-size: 10.5px; fill: var(--late); }
  .paper { fill: var(--paper); } .box { fill: var(--box); stroke: var(--edge); } .rule { stroke: var(--edge); }
  .port { fill: var(--ink); } .step { fill: var(--paper); stroke: var(--dim); }
  .physical { fill: var(--wire); } .logical { fill: none; stroke: var(--wire); stroke-width: 1.5; }
  .wire { fill: none; stroke: var(--wire); stroke-width: 1.4; } .delayed { stroke-dasharray: 5 4; }
  .label { font-size: 10.5px; fill: var(--wire); }
"""


def duration(ns: int) -> str:
    """`2 s`, `250 ms`, or nanoseconds where neither is exact."""
    if ns % SECOND == 0:
        return f"{ns // SECOND} s"
    if ns % MILLISECOND == 0:
        return f"{ns // MILLISECOND} ms"
    return f"{ns} ns"


def delay(after: int) -> str:
    """A connection's delay in words."""
    return f"after {duration(after)}" if after else "next microstep"


# Mermaid


def mermaid(program: Program) -> str:
    """A flowchart: a subgraph per reactor, with edges from triggers to reactions (dotted: only read) to what they write."""
    lines = ["flowchart LR"]
    for reactor in program.reactors:
        lines.append(f"  subgraph {reactor.name}")
        lines += [f"    {_node(element)}" for element in reactor.elements.values()]
        for number, reaction in enumerate(reactor.reactions, 1):
            lines.append(f'    {_id(reaction)}["{number} {reaction.name}<br/>{_footing(reaction)}"]')
            lines += [f"    {_id(source)} --> {_id(reaction)}" for source in reaction.on if source.reactor]
            lines += [f"    {_id(source)} -.-> {_id(reaction)}" for source in reaction.reads]
            lines += [f"    {_id(reaction)} --> {_id(effect)}" for effect in reaction.writes]
        lines.append("  end")
    for link in program.connections:
        arrow = "==>" if link.after is None else f'== "{delay(link.after)}" ==>'
        lines.append(f"  {_id(link.source)} {arrow} {_id(link.target)}")
    return "\n".join(lines) + "\n"


def _id(element: Element[Any] | Reaction) -> str:
    mark = "r" if isinstance(element, Reaction) else "e"
    return f"{element.reactor}_{mark}_{element.name}"


def _node(element: Element[Any]) -> str:
    left, right = {"input": ("[/", "/]"), "output": ("[\\", "\\]")}.get(element.kind, ("{{", "}}"))
    label = element.name if isinstance(element, Input | Output) else f"{element.name}<br/>{element.kind}"
    return f'{_id(element)}{left}"{label}"{right}'


def _footing(reaction: Reaction) -> str:
    deadline = "" if reaction.deadline is None else f", deadline {duration(reaction.deadline)}"
    return f"level {reaction.level}{deadline}"


# SVG


def svg(program: Program) -> str:
    """A picture that follows the reader's light or dark colours."""
    sheet = _Sheet(program)
    body = [*sheet.boxes_drawn(), *sheet.wires_drawn(), *_legend(sheet.height - 34)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {sheet.width} {sheet.height}" '
            f'width="{sheet.width}" height="{sheet.height}">',
            f"<style>{_STYLE}</style>",
            '<rect class="paper" width="100%" height="100%"/>',
            _text(
                24,
                34,
                f"{program.name}: {len(program.reactors)} reactors, {_levels(program)} levels",
                "title",
            ),
            *body,
            "</svg>\n",
        ]
    )


class _Box:
    """One reactor's place, and what is written in it."""

    def __init__(self, reactor: Reactor, x: int, y: int) -> None:
        self.x, self.y = x, y
        self.reactor = reactor
        elements = list(reactor.elements.values())
        self.inputs = [e for e in elements if isinstance(e, Input)]
        self.outputs = [e for e in elements if isinstance(e, Output)]
        self.actions = [e for e in elements if not isinstance(e, Input | Output)]
        self.texts = [_rights(reaction) for reaction in reactor.reactions]
        self.ports_at = y + 30
        self.actions_at = self.ports_at + _ROW * max(len(self.inputs), len(self.outputs)) + 8
        self.reactions_at = self.actions_at + _ROW * ((len(self.actions) + 1) // 2) + 8
        self.height = self.reactions_at - y + sum(_ROW + _LINE * len(t) + 6 for t in self.texts) + 4

    def port_y(self, port: Input[Any] | Output[Any]) -> int:
        """The height of a port's mark: outputs stand lower than inputs, lest the wires of two ports lie on one line."""
        if isinstance(port, Input):
            return self.ports_at + _ROW * self.inputs.index(port) + 6
        return self.ports_at + _ROW * self.outputs.index(port) + 14

    def drawn(self) -> Iterator[str]:
        """The box and everything in it."""
        x, right = self.x, self.x + _BOX
        yield f'<rect class="box" x="{x}" y="{self.y}" width="{_BOX}" height="{self.height}" rx="8"/>'
        yield _text(x + _PAD, self.y + 21, self.reactor.name, "name")
        for port in self.inputs:
            yield f'<path class="port" d="M{x - 5} {self.port_y(port) - 5}l10 5l-10 5z"/>'
            yield _text(x + _PAD, self.port_y(port) + 4, port.name, hint=str(port.type))
        for out in self.outputs:
            yield f'<path class="port" d="M{right - 5} {self.port_y(out) - 5}l10 5l-10 5z"/>'
            yield _text(right - _PAD, self.port_y(out) + 4, out.name, end=True, hint=str(out.type))
        for index, action in enumerate(self.actions):
            ax, ay = x + _PAD + (index % 2) * _BOX // 2, self.actions_at + _ROW * (index // 2) + _ROW // 2
            kind = "physical" if isinstance(action, PhysicalAction) else "logical"
            yield f'<path class="{kind}" d="M{ax} {ay}l5 -5l5 5l-5 5z"/>'
            yield _text(ax + 17, ay + 4, action.name, hint=str(action.type))
        y = self.reactions_at
        for number, (reaction, lines) in enumerate(zip(self.reactor.reactions, self.texts, strict=True), 1):
            yield f'<path class="rule" d="M{x} {y - 3}h{_BOX}"/>'
            yield from self._reaction(number, reaction, lines, y)
            y += _ROW + _LINE * len(lines) + 6

    def _reaction(self, number: int, reaction: Reaction, lines: Sequence[str], y: int) -> Iterator[str]:
        x = self.x + _PAD
        yield f'<path class="step" d="M{x} {y + 2}h20l6 8l-6 8h-20l5 -8z"/>'
        yield _text(x + 9, y + 14, str(number), "dim")
        yield _text(x + 34, y + 14, reaction.name)
        yield _text(self.x + _BOX - _PAD, y + 14, f"level {reaction.level}", "dim", end=True)
        if reaction.deadline is not None:
            yield _text(
                self.x + _BOX - 78, y + 14, f"deadline {duration(reaction.deadline)}", "late", end=True
            )
        for index, line in enumerate(lines):
            yield _text(x + 34, y + _ROW + 10 + _LINE * index, line, "dim")


class _Sheet:
    """Where the boxes are, and the lanes between them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.column = _columns(program)
        count = max(self.column.values(), default=0) + 1
        self.channels = [_Channel(program, self.column, index) for index in range(count + 1)]
        self.boxes: dict[str, _Box] = {}
        x, lowest = 24, 56
        for index in range(count):
            x = self.channels[index].place(x)
            y = 56
            for reactor in program.reactors:
                if self.column[reactor.name] == index:
                    box = self.boxes[reactor.name] = _Box(reactor, x, y)
                    y += box.height + _GAP
            lowest = max(lowest, y)
            x += _BOX
        self.width = self.channels[count].place(x) + 24
        self.around = [link for link in program.connections if not _forward(link, self.column)]
        self.floor = lowest
        self.height = lowest + _LANE * len(self.around) + 62

    def boxes_drawn(self) -> Iterator[str]:
        """Every reactor."""
        for box in self.boxes.values():
            yield from box.drawn()

    def wires_drawn(self) -> Iterator[str]:
        """Every connection, with its delay at its begin."""
        for link in self.program.connections:
            source, target = self.boxes[link.source.reactor], self.boxes[link.target.reactor]
            x, y = source.x + _BOX + 5, source.port_y(link.source)
            end, to = target.x - 5, target.port_y(link.target)
            leaves = self.channels[self.column[link.source.reactor] + 1].lane(link, "leaves")
            path = f"M{x} {y}H{leaves}"
            if link in self.around:
                enters = self.channels[self.column[link.target.reactor]].lane(link, "enters")
                path += f"V{self.floor + _LANE * self.around.index(link)}H{enters}"
            style = "wire" if link.after is None else "wire delayed"
            yield f'<path class="{style}" d="{path}V{to}H{end}"/>'
            if link.after is not None:
                yield _text(x + 4, y - 4, delay(link.after), "label")


class _Channel:
    """The space left of a column: lanes up and down, for connections that leave the column before or enter this one."""

    def __init__(self, program: Program, column: dict[str, int], index: int) -> None:
        leaving = [c for c in program.connections if column[c.source.reactor] == index - 1]
        entering = [
            c for c in program.connections if column[c.target.reactor] == index and not _forward(c, column)
        ]
        self._lanes = [*((c, "leaves") for c in leaving), *((c, "enters") for c in entering)]
        self._delayed = any(c.after is not None for c in leaving)
        self._first = 0

    def place(self, x: int) -> int:
        """Puts the channel at `x`; answers where it ends."""
        if not self._lanes:
            return x
        self._first = x + (_LABELLED if self._delayed else _STUB)
        return self._first + _LANE * len(self._lanes) + _STUB

    def lane(self, link: Connection, how: str) -> int:
        """Where a connection goes up or down."""
        return self._first + _LANE * self._lanes.index((link, how))


def _columns(program: Program) -> dict[str, int]:
    order = {reactor.name: index for index, reactor in enumerate(program.reactors)}
    columns = dict.fromkeys(order, 0)
    for name in order:
        for link in program.connections:
            before = link.source.reactor
            if link.after is None and link.target.reactor == name and order[before] < order[name]:
                columns[name] = max(columns[name], columns[before] + 1)
    return columns


def _forward(link: Connection, column: dict[str, int]) -> bool:
    return column[link.target.reactor] == column[link.source.reactor] + 1


def _rights(reaction: Reaction) -> list[str]:
    parts = [f"on {_names(reaction.on)}"]
    if reaction.reads:
        parts.append(f"reads {_names(reaction.reads)}")
    if reaction.writes:
        parts.append(f"writes {_names(reaction.writes)}")
    return [line for part in parts for line in textwrap.wrap(part, _CHARS, subsequent_indent="  ")]


def _names(elements: Iterable[Element[Any]]) -> str:
    return ", ".join(element.name for element in elements)


def _levels(program: Program) -> int:
    return 1 + max((reaction.level for reaction in program.reactions), default=-1)


def _legend(y: int) -> Iterator[str]:
    yield f'<path class="physical" d="M24 {y}l5 -5l5 5l-5 5z"/>'
    yield _text(40, y + 4, "physical action: an event from outside", "dim")
    yield f'<path class="logical" d="M304 {y}l5 -5l5 5l-5 5z"/>'
    yield _text(320, y + 4, "logical action", "dim")
    yield f'<path class="wire delayed" d="M434 {y}h30"/>'
    yield _text(470, y + 4, "delayed", "dim")
    yield _text(24, y + 20, "levels run in order at every tag; numbers are the order within a reactor", "dim")


def _text(x: int, y: int, text: str, style: str = "", end: bool = False, hint: str = "") -> str:
    attributes = f' class="{style}"' if style else ""
    attributes += ' text-anchor="end"' if end else ""
    title = f"<title>{escape(hint)}</title>" if hint else ""
    return f'<text x="{x}" y="{y}"{attributes}>{title}{escape(text)}</text>'
