"""Lends nodes to rollout and gives them back to their trainers (policy: `scheduler.policies.lending`).

Owns every node's role. Invariants:
- a node has one role at a time: its engines are wanted awake only while it is not claimed; an answered claim (role `train`) ends
  only by a release, or when the trainer is silent for `claim_s`;
- a claim is answered within `deadline_s`; engines that are not asleep by then are not waited for (the fleet kills them);
- a node whose tags allow a trainer counts as claimed until its trainer has spoken, or `claim_s` has passed, because this program
  may have restarted while the trainer computes;
- a node that is `near` is not lent, and stays so until it is lent or claimed, or its trainer waits for another batch.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

from scheduler.policies import lending as policy
from scheduler.policies.lending import LendingSettings
from scheduler.program.calls import Opened
from scheduler.program.events import EngineUnavailable
from scheduler.program.node_state import Awake, Batches, NodeEngine, ProgramNode, Way
from scheduler.program.nodes import (
    Asleep,
    Claimed,
    Filling,
    Hosted,
    Lapse,
    NodeAdded,
    NodeRemoved,
    Overdue,
    Released,
    Role,
    RoleIs,
    Wanted,
)
from scheduler.reactor import SECOND, Context, Reactor
from scheduler.reactor.elements import Input, Source


class Lending(Reactor):
    """The nodes of a cluster, and the engines on them."""

    def __init__(self, name: str, settings: LendingSettings, models: dict[str, str]) -> None:
        """`models`: for each model, what the names of its ports end with."""
        super().__init__(name)
        self._settings = settings
        self._nodes: dict[str, ProgramNode] = {}
        self._engines: dict[str, NodeEngine] = {}
        self._batches = Batches(settings.smooth_s)
        self._serials = itertools.count(1)
        self._roles: dict[str, RoleIs] = {}
        self._wanted: dict[str, Wanted] = {}
        self.added = self.physical("added", NodeAdded)
        self.removed = self.physical("removed", NodeRemoved)
        self.hosted = self.physical("hosted", Hosted)
        self.claimed = self.physical("claimed", Claimed)
        self.released = self.physical("released", Released)
        self.filling = self.physical("filling", Filling)
        self.lapse = self.logical("lapse", Lapse)
        self.overdue = self.logical("overdue", Overdue)
        self.opened = {model: self.input(f"opened_{slug}", Opened) for model, slug in models.items()}
        self.unavailable = {
            model: self.input(f"unavailable_{slug}", tuple[EngineUnavailable, ...])
            for model, slug in models.items()
        }
        self.asleep = {
            model: self.input(f"asleep_{slug}", tuple[Asleep, ...]) for model, slug in models.items()
        }
        self.roles = self.output("roles", tuple[RoleIs, ...])
        self.wanted = self.output("wanted", tuple[Wanted, ...])
        self._declare(models)

    def _declare(self, models: dict[str, str]) -> None:
        switches = [self.overdue]
        self.reaction(self._on_added, on=[self.added], writes=[self.lapse, *switches])
        self.reaction(self._on_removed, on=[self.removed])
        self.reaction(self._on_hosted, on=[self.hosted])
        self.reaction(self._on_claimed, on=[self.claimed], writes=[self.lapse, *switches])
        self.reaction(self._on_released, on=[self.released])
        self.reaction(self._on_lapse, on=[self.lapse])
        self.reaction(self._on_overdue, on=[self.overdue], writes=switches)
        self.reaction(self._on_filling, on=[self.filling])
        every: list[Source[Any]] = [
            *(self.added, self.removed, self.hosted, self.claimed, self.released),
            *(self.lapse, self.overdue, self.filling),
        ]
        for model, slug in models.items():
            received: tuple[tuple[str, Input[Any], Any], ...] = (
                ("unavailable", self.unavailable[model], self._on_unavailable),
                ("asleep", self.asleep[model], self._on_asleep),
                ("opened", self.opened[model], self._on_opened),
            )
            for what, port, react in received:
                self.reaction(partial(react, model, port), on=[port], name=f"on_{what}_{slug}")
                every.append(port)
        self.reaction(self._consider, on=every, writes=switches)
        self.reaction(self._emit, on=every, writes=[self.roles, self.wanted])

    # Nodes and engines come and go

    def _on_added(self, now: Context) -> None:
        added = now[self.added]
        tags, known = frozenset(added.tags), self._nodes.get(added.node)
        if known is not None and known.tags == tags:
            return
        node = self._nodes[added.node] = ProgramNode(added.node, tags) if known is None else known
        node.tags = tags
        node.claimed, node.near, node.way, node.called_back_at = False, False, None, None
        node.unsure = "train" in tags
        node.lent = "rollout" in tags and "train" not in tags
        self._role(node, "rollout" if node.lent else "idle", "it was added, tagged " + ", ".join(added.tags))
        for engine in node.engines:
            self._want(engine, node.lent, f"the tags of {added.node} are {', '.join(added.tags)}")
        if node.unsure:
            self._expect(now, node)

    def _on_removed(self, now: Context) -> None:
        node = self._nodes.pop(now[self.removed].node, None)
        for engine in node.engines if node is not None else ():
            self._engines[engine].node = ""

    def _on_hosted(self, now: Context) -> None:
        hosted = now[self.hosted]
        known = self._engines.get(hosted.engine)
        if known is not None and not known.leaving and known.node == hosted.node:
            return
        self._drop(hosted.engine)
        node = self._nodes.get(hosted.node)
        if node is None:
            return
        self._engines[hosted.engine] = NodeEngine(hosted.node)
        node.engines[hosted.engine] = None
        self._want(hosted.engine, node.lent, f"it lives on {hosted.node}, which is {node.role}")
        if node.way is not None:
            node.pending.add(hosted.engine)

    def _drop(self, engine: str) -> None:
        known = self._engines.pop(engine, None)
        if known is not None and known.node:
            del self._nodes[known.node].engines[engine]

    def _on_unavailable(self, model: str, port: Input[tuple[EngineUnavailable, ...]], now: Context) -> None:
        for unavailable in now[port]:
            engine = self._engine_of(unavailable.engine, model)
            engine.open = engine.asleep = False
            engine.leaving |= unavailable.removed

    def _on_asleep(self, model: str, port: Input[tuple[Asleep, ...]], now: Context) -> None:
        for asleep in now[port]:
            engine = self._engines.get(asleep.engine)
            if engine is None:
                continue  # the node was removed
            engine.model, engine.open, engine.asleep, engine.warm = model, False, True, asleep.warm
            node = self._nodes.get(engine.node)
            if node is not None and (node.way == "call back" or engine.leaving):
                self._switched(now, asleep.engine, node)
            if engine.leaving:
                self._drop(asleep.engine)

    def _on_opened(self, model: str, port: Input[Opened], now: Context) -> None:
        name = now[port].engine
        engine = self._engine_of(name, model)
        engine.open, engine.asleep, engine.warm = True, False, True
        node = self._nodes.get(engine.node)
        if node is not None and node.way == "lend":
            self._switched(now, name, node)

    def _engine_of(self, name: str, model: str) -> NodeEngine:
        engine = self._engines.setdefault(name, NodeEngine())
        engine.model = model
        return engine

    # Messages from trainers

    def _on_claimed(self, now: Context) -> None:
        claimed = now[self.claimed]
        node = self._nodes.get(claimed.node)
        if node is None or "train" not in node.tags:
            return
        self._expect(now, node)
        if node.claimed:
            return
        node.claimed, node.unsure, node.near, node.model = True, False, False, claimed.model
        node.called_back_at = None
        if node.way != "call back":
            self._call_back(now, node, f"the trainer of {claimed.model} claims it")

    def _on_released(self, now: Context) -> None:
        released = now[self.released]
        node = self._nodes.get(released.node)
        if node is None or "train" not in node.tags:
            return
        node.model, had = released.model, node.claimed or node.unsure
        self._free(node, f"the trainer of {released.model} waits")
        more = any(other.claimed and other.model == released.model for other in self._nodes.values())
        if released.busy_s and had and not more:  # the trainer reports the same for each of its nodes
            self._batches.trained(released.model, released.busy_s)
        if released.load_s and had:
            node.load.measured(released.load_s)

    def _on_lapse(self, now: Context) -> None:
        lapse = now[self.lapse]
        node = self._nodes.get(lapse.node)
        if node is not None and node.claim == lapse.serial:
            self._free(node, f"no trainer has spoken for {self._settings.claim_s:g} s")

    def _free(self, node: ProgramNode, reason: str) -> None:
        had = node.claimed or node.unsure
        node.claimed = node.unsure = node.near = False
        node.claim = next(self._serials)
        if had and node.way is None:
            self._role(node, "idle", reason)

    def _expect(self, now: Context, node: ProgramNode) -> None:
        """Renew the deadline of a trainer that has sent a request."""
        node.claim = next(self._serials)
        now.schedule(self.lapse, Lapse(node.name, node.claim), after=_ns(self._settings.claim_s))

    def _on_filling(self, now: Context) -> None:
        self._batches.filled(now.tag.time / SECOND, now[self.filling])

    # Switches

    def _call_back(self, now: Context, node: ProgramNode, reason: str) -> None:
        node.lent = False
        self._begin(now, node, "call back", reason)

    def _begin(self, now: Context, node: ProgramNode, way: Way, reason: str) -> None:
        node.way, node.began, node.serial = way, now.tag.time, next(self._serials)
        node.pending = set()
        for engine in node.engines:
            known = self._engines[engine]
            if (way == "lend" and not known.open) or (way == "call back" and not known.asleep):
                node.pending.add(engine)
            self._want(engine, node.lent, reason)
        node.cold = any(not self._engines[engine].warm for engine in node.pending)
        if not node.pending:
            self._end(node, reason)
            return
        self._role(node, "switching", reason)
        now.schedule(self.overdue, Overdue(node.name, node.serial), after=_ns(self._settings.deadline_s))

    def _switched(self, now: Context, engine: str, node: ProgramNode) -> None:
        """Handle an engine that has done what its node's switch waits for, or was removed."""
        if node.way is None or engine not in node.pending:
            return
        node.pending.discard(engine)
        if not node.pending:
            seconds = (now.tag.time - node.began) / SECOND
            mean = node.sleep if node.way == "call back" else node.launch if node.cold else node.wake
            mean.measured(seconds)
            self._end(node, f"it took {seconds:.2f} s")

    def _end(self, node: ProgramNode, reason: str) -> None:
        way, node.way, node.pending = node.way, None, set()
        role: Role = "rollout" if way == "lend" else "train" if node.claimed else "idle"
        self._role(node, role, reason)

    def _on_overdue(self, now: Context) -> None:
        overdue = now[self.overdue]
        node = self._nodes.get(overdue.node)
        if node is None or node.way is None or node.serial != overdue.serial:
            return
        late = ", ".join(sorted(node.pending))
        if node.way == "call back":
            self._end(node, f"{late} did not fall asleep within {self._settings.deadline_s:g} s")
        elif any(self._engines[engine].open for engine in node.engines):
            self._end(node, f"{late} did not open within {self._settings.deadline_s:g} s")
        else:  # the engine is still on its way, like a launched one
            now.schedule(self.overdue, overdue, after=_ns(self._settings.deadline_s))

    # Nodes that no trainer has

    def _consider(self, now: Context) -> None:
        nodes = [node for node in self._nodes.values() if node.unused]
        if not nodes:
            return
        awake = Awake(self._engines, self._nodes)
        for node in nodes:
            if node.lent:
                self._consider_calling_back(now, node, awake)
            elif not (node.lendable and node.engines):
                self._near(node, "it has no engine that could sample")
            elif node.way is None:
                self._consider_lending(now, node, awake)

    def _consider_lending(self, now: Context, node: ProgramNode, awake: Awake) -> None:
        models = self._models(node)
        cold = any(not self._engines[engine].warm for engine in node.engines)
        called_back = node.called_back_at
        state = policy.Lendable(
            wait_s=self._batches.wait_s(node.model),
            calls=self._batches.calls(models),
            awake=sum(awake.of[model] - awake.on[node.name, model] for model in models),
            wake_s=(node.launch if cold else node.wake).value,
            sleep_s=node.sleep.value,
            called_back_s=math.inf if called_back is None else (now.tag.time - called_back) / SECOND,
            train_s=self._batches.train_s(node.model),
            load_s=node.load.value,
        )
        verdict = policy.lend(state, self._settings)
        if verdict.yes:
            node.lent, node.lent_at, node.near = True, now.tag.time, False
            self._begin(now, node, "lend", verdict.reason)
        elif verdict.near:
            self._near(node, verdict.reason)

    def _consider_calling_back(self, now: Context, node: ProgramNode, awake: Awake) -> None:
        staying = sum(awake.of[model] - awake.lent[node.model, model] for model in self._models(node))
        state = policy.Lent(
            wait_s=self._batches.wait_s(node.model),
            awake=staying,
            sleep_s=node.sleep.value,
            lent_s=(now.tag.time - node.lent_at) / SECOND,
            train_s=self._batches.train_s(node.model),
            load_s=node.load.value,
        )
        verdict = policy.call_back(state, self._settings)
        if verdict.yes:
            node.near, node.called_back_at = True, now.tag.time
            self._call_back(now, node, verdict.reason)

    def _near(self, node: ProgramNode, reason: str) -> None:
        """Mark a node that has no other use before the batch is whole."""
        if not node.near:
            node.near = True
            self._role(node, node.role, reason)

    def _models(self, node: ProgramNode) -> list[str]:
        return sorted({self._engines[engine].model for engine in node.engines})

    # Reports

    def _want(self, engine: str, awake: bool, reason: str) -> None:
        self._wanted[engine] = Wanted(engine, awake, reason)

    def _role(self, node: ProgramNode, role: Role, reason: str) -> None:
        node.role = role
        self._roles[node.name] = RoleIs(node.name, role, reason, node.near)

    def _emit(self, now: Context) -> None:
        if self._roles:
            why = "; ".join(f"{role.node}: {role.reason}" for role in self._roles.values())
            now.set(self.roles, tuple(self._roles.values()), why=why)
        if self._wanted:
            why = "; ".join(f"{wanted.engine}: {wanted.reason}" for wanted in self._wanted.values())
            now.set(self.wanted, tuple(self._wanted.values()), why=why)
        self._roles, self._wanted = {}, {}


def _ns(seconds: float) -> int:
    return int(seconds * SECOND)
