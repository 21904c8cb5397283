"""Small programs for the tests; `build` makes one from JSON, so random ones can be drawn, recorded and replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from scheduler.reactor import Context, Input, Output, Program, Reactor


@dataclass(frozen=True, slots=True)
class Lost:
    """An engine is gone."""

    engine: str
    code: int = 0


@dataclass(frozen=True, slots=True)
class Again:
    """Time to try again."""

    engine: str


@dataclass(frozen=True, slots=True)
class Do:
    """A command."""

    engine: str
    step: Literal["launch", "stop"]


class Fleet(Reactor):
    """Stops what is lost, launches it a second later, at most `restarts` times."""

    def __init__(self, restarts: int = 2) -> None:
        super().__init__("fleet")
        self.left = restarts
        self.lost = self.physical("lost", Lost)
        self.again = self.logical("again", Again)
        self.commands = self.output("commands", tuple[Do, ...])
        self.reaction(self._on_lost, on=[self.lost], writes=[self.commands, self.again])
        self.reaction(self._on_again, on=[self.again], writes=[self.commands])

    def _on_lost(self, now: Context) -> None:
        lost = now[self.lost]
        if lost.code == 99:
            raise RuntimeError("no such engine")
        now.set(self.commands, (Do(lost.engine, "stop"),), why=f"{lost.engine} ended with {lost.code}")
        if self.left:
            self.left -= 1
            now.schedule(self.again, Again(lost.engine), after=1_000_000_000)

    def _on_again(self, now: Context) -> None:
        now.set(self.commands, (Do(now[self.again].engine, "launch"),), why="a second has passed")


class Log(Reactor):
    """Counts commands."""

    def __init__(self) -> None:
        super().__init__("log")
        self.seen = 0
        self.commands = self.input("commands", tuple[Do, ...])
        self.count = self.output("count", int)
        self.reaction(self._on_commands, on=[self.commands], writes=[self.count])

    def _on_commands(self, now: Context) -> None:
        self.seen += len(now[self.commands])
        now.set(self.count, self.seen)


def toy(settings: dict[str, Any]) -> Program:
    """A fleet and a log."""
    fleet, log = Fleet(settings.get("restarts", 2)), Log()
    program = Program("toy", [fleet, log])
    program.connect(fleet.commands, log.commands)
    return program.seal()


# Random programs


@dataclass
class _State:
    """The state of a random reactor: it and the present inputs determine everything the reactor does."""

    sum: int = 1
    budget: int = 12
    sent: dict[str, Any] = field(default_factory=dict)


class Random(Reactor):
    """A reactor whose reactions do arbitrary, but determined, things with what they may touch."""

    def __init__(self, name: str, spec: dict[str, Any]) -> None:
        super().__init__(name)
        self.state = _State()
        self.event = self.physical("event", int)
        self.self_made = self.logical("self_made", int)
        self.inputs = [self.input(f"in{i}", int) for i in range(spec["inputs"])]
        self.outputs = [self.output(f"out{i}", int) for i in range(spec["outputs"])]
        sources = [self.event, self.self_made, *self.inputs]
        effects = [self.self_made, *self.outputs]
        for index, wanted in enumerate(spec["reactions"]):
            on = [source for i, source in enumerate(sources) if i in wanted["on"]] or [self.event]
            writes = [effect for i, effect in enumerate(effects) if i in wanted["writes"]]
            self.reaction(self._body(on, writes, index + 1), on, writes, name=f"r{index}")

    def _body(self, sources: list[Any], effects: list[Any], salt: int) -> Callable[[Context], None]:
        def body(now: Context) -> None:
            state = self.state
            for source in sources:
                state.sum = (state.sum * 31 + (now.get(source) or 0) * salt + 7) % 1009
            for number, effect in enumerate(effects):
                if state.budget == 0 or (state.sum + number) % 3 == 0:
                    continue
                if isinstance(effect, Output):
                    if state.sent.get(effect.name) == now.tag:
                        continue
                    state.sent[effect.name] = now.tag
                    now.set(effect, state.sum + number, why=f"salt {salt}")
                else:
                    now.schedule(effect, state.sum, after=state.sum % 4)
                state.budget -= 1

        return body


def build(settings: dict[str, Any]) -> Program:
    """A random program from its description; a link is [output's index, input's index, delay], over all reactors."""
    reactors = [Random(f"x{index}", spec) for index, spec in enumerate(settings["reactors"])]
    outputs: list[Output[int]] = [port for reactor in reactors for port in reactor.outputs]
    inputs: list[Input[int]] = [port for reactor in reactors for port in reactor.inputs]
    program = Program("random", reactors)
    taken = set()
    for source, target, after in settings["links"]:
        if outputs and inputs and target % len(inputs) not in taken:
            taken.add(target % len(inputs))
            program.connect(outputs[source % len(outputs)], inputs[target % len(inputs)], after)
    return program.seal()
