"""The state of each node at each moment of a recording. Pure.

The state is decided by the first of these that applies:

- the node's role, if nodes are lent (`RoleChange`): `switching` is switching; except for rollout, the trainer's state counts;
- the trainer, on a node without engines: it trains, publishes (switching), or waits (idle). Without a trainer's metrics a
  leased and complete batch counts as training until the new version is published;
- the engines: rollout if one is open and has calls; else switching if one is between `launch` or `hold` and `open`; else idle. In
  a recording without calls every open engine is in rollout.

An engine without a node is a node of its own, and so is a trainer without one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.planning.timeline import Kind, Step, Timeline, intervals_of

_ENGINE = ("StepCommand", "StepResult", "Opened", "Closed", "Asleep", "Removed", "Added")
_BATCH = ("Leased", "BatchReady", "Published", "UpdateResult", "Consume")


@dataclass(frozen=True, slots=True)
class Moment:
    """One input or decision of a recorded run. `value` is its JSON form (`scheduler.program`,
    `scheduler.policies.staleness_events`). Two types are added here: `Stops`, the gateway has ended; `Works`, a
    trainer does work of a `kind` from now on."""

    at: float
    """Seconds since 1970."""
    value: dict[str, Any]
    model: str | None = None
    """The model of the reactor."""

    @property
    def type(self) -> str:
        """The name of the value's class."""
        return str(self.value.get("type", ""))


@dataclass(slots=True)
class _Engine:
    node: str
    phase: Kind = "idle"
    """`rollout`: open, with or without calls."""
    calls: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Node:
    rollout: bool = True
    """True if the node may have engines; others belong to their trainers."""
    role: Kind | None = None
    trainer: str | None = None
    """The model that is trained on the node."""
    engines: set[str] = field(default_factory=set)
    changes: list[tuple[float, Kind]] = field(default_factory=list)


@dataclass(slots=True)
class _Trainer:
    kind: Kind | None = None
    """None: unknown."""
    leased: int = -1
    complete: int = -1
    """The newest complete batch."""
    steps: list[Step] = field(default_factory=list)
    """The time in seconds since 1970."""

    def ended(self, step: Step) -> None:
        """Add a step that is later in number and time; others have no length, or belong to a restarted ledger."""
        if not self.steps or (step.number > self.steps[-1].number and step.end_s > self.steps[-1].end_s):
            self.steps.append(step)


class Nodes:
    """All nodes, engines and trainers of a run. `apply` its moments in order, then read the `timeline`."""

    def __init__(self, trainers: Mapping[str, str], with_metrics: frozenset[str], has_calls: bool) -> None:
        """`trainers`: the trained model by node. `with_metrics`: the models whose trainers' metrics are known."""
        self._with_metrics = with_metrics
        self._has_calls = has_calls
        self._engines: dict[str, _Engine] = {}
        self._calls: dict[str, str] = {}
        self._trainers: dict[str, _Trainer] = {
            model: _Trainer("idle" if model in with_metrics else None) for model in trainers.values()
        }
        self._nodes = {node: _Node(trainer=model) for node, model in trainers.items()}
        self._known: set[str] = set()

    @classmethod
    def of(cls, moments: Sequence[Moment], with_metrics: frozenset[str]) -> Nodes:
        """Build the nodes in their first state. Which trainer is on which node is read from the whole run."""
        trained = dict.fromkeys(m.model for m in moments if m.model and m.type in ("Leased", "Works"))
        claims = {m.value["node"]: m.value["model"] for m in moments if m.type == "Claimed"}
        tagged = {m.value["node"] for m in moments if m.type == "NodeAdded" and "train" in m.value["tags"]}
        if not claims and len(trained) == len(tagged) == 1:  # otherwise the trainer could be on any node
            claims = {next(iter(tagged)): next(iter(trained))}
        homeless = [model for model in trained if model not in claims.values()]
        names = {"trainer" if len(trained) == 1 else f"trainer {model}": model for model in homeless}
        nodes = cls(claims | names, with_metrics, any(m.type in ("Demand", "Placed") for m in moments))
        for name in names:
            nodes._nodes[name].rollout = False
            nodes._known.add(name)
        return nodes

    def apply(self, moment: Moment) -> None:
        """Record the new state of every node that the moment changes."""
        value, kind = moment.value, moment.type
        touched: Iterable[str] = ()
        if kind in _ENGINE:
            touched = self._on_engine(value)
        elif kind in ("Placed", "Demand"):
            touched = self._on_calls(value)
        elif kind in ("NodeAdded", "NodeRemoved", "Hosted", "RoleChange"):
            touched = self._on_node(value)
        elif kind in (*_BATCH, "Works") and moment.model is not None:
            touched = self._on_trainer(moment, moment.model)
        elif kind == "Stops":
            touched = self._on_stop()
        for name in set(touched):
            node = self._nodes[name]
            doing = self._kind(node)
            if not node.changes or node.changes[-1][1] != doing:
                node.changes.append((moment.at, doing))

    def add_steps(self, model: str, steps: Sequence[Step]) -> None:
        """Use the trainer's own steps if the recording has none of its ledger."""
        trainer = self._trainers.setdefault(model, _Trainer())
        trainer.steps = trainer.steps or list(steps)

    def timeline(self, start: float, end: float) -> Timeline:
        """Return the timeline from `start` to `end` (seconds since 1970), with the steps of the trainer that has most."""
        chosen = max(self._trainers.values(), key=lambda trainer: len(trainer.steps), default=_Trainer())
        steps = [Step(step.number, step.end_s - start) for step in chosen.steps if start < step.end_s <= end]
        shown = sorted(self._known, key=lambda name: (self._nodes[name].trainer is not None, name))
        intervals = [
            interval
            for name in shown
            for interval in intervals_of(
                name, [(at - start, kind) for at, kind in self._nodes[name].changes], 0.0, end - start
            )
        ]
        return Timeline(0.0, end - start, tuple(intervals), tuple(steps), start)

    # Events

    def _on_stop(self) -> set[str]:
        """Set every engine to idle: the gateway has ended, and its engines are unknown."""
        for engine in self._engines.values():
            self._rest(engine)
        return {engine.node for engine in self._engines.values()}

    def _on_node(self, value: dict[str, Any]) -> set[str]:
        name = value["node"]
        if value["type"] == "Hosted":
            return self._host(value["engine"], name)
        node = self._node(name)
        if value["type"] == "NodeAdded":
            node.rollout = "rollout" in value["tags"]
        else:
            node.role = value.get("role", "idle")
        return {name}

    def _host(self, engine: str, name: str) -> set[str]:
        """Move the engine to the node; without a name the engine is a node of its own."""
        known = self._engine(engine, name or engine)
        before = known.node
        known.node = name or engine
        self._nodes[before].engines.discard(engine)
        self._node(known.node).engines.add(engine)
        if before == engine != known.node and not self._nodes[before].changes:
            self._known.discard(before)
        return {known.node}

    def _on_engine(self, value: dict[str, Any]) -> set[str]:
        engine = self._engine(value["engine"])
        match value["type"], value.get("step"):
            case ("Opened", _) | ("StepResult", "open") if value.get("ok", True):
                engine.phase = "rollout"
            case (
                ("StepCommand", "stop" | "quarantine")
                | ("StepResult", "stop" | "sleep")
                | ("Asleep" | "Removed", _)
            ):
                self._rest(engine)
            case "StepCommand", _:
                engine.phase = "switching"
            case "Closed", _ if engine.phase == "rollout":
                self._rest(engine)
        return {engine.node}

    def _rest(self, engine: _Engine) -> None:
        engine.phase = "idle"
        for call in engine.calls:
            self._calls.pop(call, None)
        engine.calls.clear()

    def _on_calls(self, value: dict[str, Any]) -> set[str]:
        if value["type"] == "Demand":
            return {node for left in value["left"] for node in self._leave(left["call"])}
        touched = self._leave(value["call"])
        engine = self._engine(value["engine"])
        engine.calls.add(value["call"])
        self._calls[value["call"]] = value["engine"]
        return {*touched, engine.node}

    def _leave(self, call: str) -> set[str]:
        name = self._calls.pop(call, None)
        if name is None:
            return set()
        self._engines[name].calls.discard(call)
        return {self._engines[name].node}

    def _on_trainer(self, moment: Moment, model: str) -> list[str]:
        trainer, value = self._trainers.setdefault(model, _Trainer()), moment.value
        if moment.type == "Works":
            trainer.kind = value["kind"]
        elif moment.type == "Leased":
            trainer.leased = value["batch"]
        elif moment.type == "BatchReady":
            trainer.complete = max(trainer.complete, value["batch"])
        elif moment.type == "Consume":
            trainer.ended(Step(value["batch"], moment.at))
        if model not in self._with_metrics and moment.type != "Works":
            trainer.kind = _kind_without_metrics(trainer, moment.type)
        return [name for name, node in self._nodes.items() if node.trainer == model]

    # Conclusions

    def _kind(self, node: _Node) -> Kind:
        trains = self._trainers[node.trainer].kind if node.trainer else None
        if node.role == "switching":
            return "switching"
        if node.role == "train":
            return trains or "train"
        if node.role == "idle":  # a trainer may work without a claim
            return trains or "idle"
        if not node.rollout:
            return trains or "idle"
        if node.role is None and trains == "train":
            return "train"
        engines = [self._engines[name] for name in node.engines]
        if any(e.phase == "rollout" and (e.calls or not self._has_calls) for e in engines):
            return "rollout"
        return "switching" if any(engine.phase == "switching" for engine in engines) else "idle"

    def _node(self, name: str) -> _Node:
        self._known.add(name)
        return self._nodes.setdefault(name, _Node())

    def _engine(self, name: str, node: str = "") -> _Engine:
        if name not in self._engines:
            self._engines[name] = _Engine(node or name)
            self._node(node or name).engines.add(name)
        return self._engines[name]


def _kind_without_metrics(trainer: _Trainer, event: str) -> Kind:
    """Return the state of a trainer without metrics after an event of the ledger or of an update."""
    if event == "Published" and trainer.leased >= 0:
        return "switching"
    if event in ("UpdateResult", "Consume", "Published"):
        return "idle"
    trained = {step.number for step in trainer.steps[-1:]}
    begins = 0 <= trainer.leased <= trainer.complete and trainer.leased not in trained
    return "train" if begins and trainer.kind != "switching" else trainer.kind or "idle"
