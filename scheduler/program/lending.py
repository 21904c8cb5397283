"""Lends nodes to rollout and recalls them for their trainers (policy: `scheduler.policies.lending`).

Owns every node's role. Invariants:
- a node has one role at a time: its engines are wanted awake only while it is not claimed; a granted claim (role `train`) ends
  only by a release, or when the trainer sends nothing for `claim_s`;
- a claim is granted within `deadline_s`; engines that are not asleep by then are not waited for (the fleet kills them);
- a node whose tags allow a trainer counts as claimed until its trainer sends a request, or `claim_s` has passed, because this
  program may have restarted while the trainer computes;
- a node that is `claimable` is not lent, and stays so until it is lent or claimed, or its trainer waits for another batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from scheduler.policies import lending as policy
from scheduler.policies.lending import LendingSettings
from scheduler.program.calls import Opened
from scheduler.program.events import EngineUnavailable
from scheduler.program.node_state import AwakeEngines, Batches, NodeEngine, ProgramNode, Switch
from scheduler.program.nodes import (
    Asleep,
    Claimed,
    ClaimTimeout,
    Filling,
    Hosted,
    NodeAdded,
    NodeRemoved,
    Released,
    Role,
    RoleChange,
    SwitchTimeout,
    Wanted,
)
from scheduler.program.serials import Serials
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
        self._serials = Serials()
        self._roles: dict[str, RoleChange] = {}
        self._wanted: dict[str, Wanted] = {}
        self.added = self.physical("added", NodeAdded)
        self.removed = self.physical("removed", NodeRemoved)
        self.hosted = self.physical("hosted", Hosted)
        self.claimed = self.physical("claimed", Claimed)
        self.released = self.physical("released", Released)
        self.filling = self.physical("filling", Filling)
        self.claim_timeout = self.logical("claim_timeout", ClaimTimeout)
        self.switch_timeout = self.logical("switch_timeout", SwitchTimeout)
        self.opened = {model: self.input(f"opened_{slug}", Opened) for model, slug in models.items()}
        self.unavailable = {
            model: self.input(f"unavailable_{slug}", tuple[EngineUnavailable, ...])
            for model, slug in models.items()
        }
        self.asleep = {
            model: self.input(f"asleep_{slug}", tuple[Asleep, ...]) for model, slug in models.items()
        }
        self.roles = self.output("roles", tuple[RoleChange, ...])
        self.wanted = self.output("wanted", tuple[Wanted, ...])
        self._declare(models)

    def _declare(self, models: dict[str, str]) -> None:
        switches = [self.switch_timeout]
        self.reaction(self._on_added, on=[self.added], writes=[self.claim_timeout, *switches])
        self.reaction(self._on_removed, on=[self.removed])
        self.reaction(self._on_hosted, on=[self.hosted])
        self.reaction(self._on_claimed, on=[self.claimed], writes=[self.claim_timeout, *switches])
        self.reaction(self._on_released, on=[self.released])
        self.reaction(self._on_claim_timeout, on=[self.claim_timeout])
        self.reaction(self._on_switch_timeout, on=[self.switch_timeout], writes=switches)
        self.reaction(self._on_filling, on=[self.filling])
        every: list[Source[Any]] = [
            *(self.added, self.removed, self.hosted, self.claimed, self.released),
            *(self.claim_timeout, self.switch_timeout, self.filling),
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

    def facts(self) -> Iterator[NodeAdded | RoleChange | Claimed | Hosted]:
        """Yield the nodes and their engines, as the events that report them."""
        for node in self._nodes.values():
            yield NodeAdded(node.name, tuple(sorted(node.tags)))
            yield RoleChange(node.name, node.role, claimable=node.claimable)
            if node.model:
                yield Claimed(node.name, node.model)
            for engine in node.engines:
                yield Hosted(engine, node.name)

    # Nodes and engines

    def _on_added(self, now: Context) -> None:
        added = now[self.added]
        tags, known = frozenset(added.tags), self._nodes.get(added.node)
        if known is not None and known.tags == tags:
            return
        node = self._nodes[added.node] = ProgramNode(added.node, tags) if known is None else known
        node.tags = tags
        node.claimed, node.claimable, node.switch, node.recalled_at = False, False, None, None
        node.unknown_claim = "train" in tags
        node.lent = "rollout" in tags and "train" not in tags
        self._role(node, "rollout" if node.lent else "idle", "it was added, tagged " + ", ".join(added.tags))
        for engine in node.engines:
            self._want(engine, node.lent, f"the tags of {added.node} are {', '.join(added.tags)}")
        if node.unknown_claim:
            self._renew_claim(now, node)

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
        if node.switch is not None:
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
            if node is not None and (node.switch == "recall" or engine.leaving):
                self._engine_switched(now, asleep.engine, node)
            if engine.leaving:
                self._drop(asleep.engine)

    def _on_opened(self, model: str, port: Input[Opened], now: Context) -> None:
        name = now[port].engine
        engine = self._engine_of(name, model)
        engine.open, engine.asleep, engine.warm = True, False, True
        node = self._nodes.get(engine.node)
        if node is not None and node.switch == "lend":
            self._engine_switched(now, name, node)

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
        self._renew_claim(now, node)
        if node.claimed:
            return
        node.claimed, node.unknown_claim, node.claimable, node.model = True, False, False, claimed.model
        node.recalled_at = None
        if node.switch != "recall":
            self._recall(now, node, f"the trainer of {claimed.model} claims it")

    def _on_released(self, now: Context) -> None:
        released = now[self.released]
        node = self._nodes.get(released.node)
        if node is None or "train" not in node.tags:
            return
        node.model, had = released.model, node.claimed or node.unknown_claim
        self._end_claim(node, f"the trainer of {released.model} waits")
        more = any(other.claimed and other.model == released.model for other in self._nodes.values())
        if released.busy_s and had and not more:  # the trainer reports the same for each of its nodes
            self._batches.trained(released.model, released.busy_s)
        if released.load_s and had:
            node.load.measured(released.load_s)

    def _on_claim_timeout(self, now: Context) -> None:
        timeout = now[self.claim_timeout]
        node = self._nodes.get(timeout.node)
        if node is not None and node.claim == timeout.serial:
            self._end_claim(node, f"no trainer has sent a request for {self._settings.claim_s:g} s")

    def _end_claim(self, node: ProgramNode, reason: str) -> None:
        had = node.claimed or node.unknown_claim
        node.claimed = node.unknown_claim = node.claimable = False
        node.claim = next(self._serials)
        if had and node.switch is None:
            self._role(node, "idle", reason)

    def _renew_claim(self, now: Context, node: ProgramNode) -> None:
        """Renew the deadline of a trainer that has sent a request."""
        node.claim = next(self._serials)
        now.schedule(
            self.claim_timeout, ClaimTimeout(node.name, node.claim), after=_ns(self._settings.claim_s)
        )

    def _on_filling(self, now: Context) -> None:
        self._batches.filled(now.tag.time / SECOND, now[self.filling])

    # Switches

    def _recall(self, now: Context, node: ProgramNode, reason: str) -> None:
        node.lent = False
        self._begin_switch(now, node, "recall", reason)

    def _begin_switch(self, now: Context, node: ProgramNode, switch: Switch, reason: str) -> None:
        node.switch, node.began, node.serial = switch, now.tag.time, next(self._serials)
        node.pending = set()
        for engine in node.engines:
            known = self._engines[engine]
            if (switch == "lend" and not known.open) or (switch == "recall" and not known.asleep):
                node.pending.add(engine)
            self._want(engine, node.lent, reason)
        node.cold = any(not self._engines[engine].warm for engine in node.pending)
        if not node.pending:
            self._end_switch(node, reason)
            return
        self._role(node, "switching", reason)
        now.schedule(
            self.switch_timeout, SwitchTimeout(node.name, node.serial), after=_ns(self._settings.deadline_s)
        )

    def _engine_switched(self, now: Context, engine: str, node: ProgramNode) -> None:
        """Record that an engine of a node that is being switched is awake or asleep as required, or was removed."""
        if node.switch is None or engine not in node.pending:
            return
        node.pending.discard(engine)
        if not node.pending:
            seconds = (now.tag.time - node.began) / SECOND
            mean = node.sleep if node.switch == "recall" else node.launch if node.cold else node.wake
            mean.measured(seconds)
            self._end_switch(node, f"it took {seconds:.2f} s")

    def _end_switch(self, node: ProgramNode, reason: str) -> None:
        switch, node.switch, node.pending = node.switch, None, set()
        role: Role = "rollout" if switch == "lend" else "train" if node.claimed else "idle"
        self._role(node, role, reason)

    def _on_switch_timeout(self, now: Context) -> None:
        timeout = now[self.switch_timeout]
        node = self._nodes.get(timeout.node)
        if node is None or node.switch is None or node.serial != timeout.serial:
            return
        late = ", ".join(sorted(node.pending))
        if node.switch == "recall":
            self._end_switch(node, f"{late} did not fall asleep within {self._settings.deadline_s:g} s")
        elif any(self._engines[engine].open for engine in node.engines):
            self._end_switch(node, f"{late} did not open within {self._settings.deadline_s:g} s")
        else:  # its engines are still being started
            now.schedule(self.switch_timeout, timeout, after=_ns(self._settings.deadline_s))

    # Nodes that no trainer uses

    def _consider(self, now: Context) -> None:
        nodes = [node for node in self._nodes.values() if node.unused]
        if not nodes:
            return
        awake = AwakeEngines(self._engines, self._nodes)
        for node in nodes:
            if node.lent:
                self._consider_recall(now, node, awake)
            elif not (node.lendable and node.engines):
                self._mark_claimable(node, "it has no engine that could sample")
            elif node.switch is None:
                self._consider_lending(now, node, awake)

    def _consider_lending(self, now: Context, node: ProgramNode, awake: AwakeEngines) -> None:
        models = self._models(node)
        cold = any(not self._engines[engine].warm for engine in node.engines)
        recalled = node.recalled_at
        state = policy.Lendable(
            wait_s=self._batches.wait_s(node.model),
            calls=self._batches.calls(models),
            awake=sum(awake.of[model] - awake.on[node.name, model] for model in models),
            wake_s=(node.launch if cold else node.wake).value,
            sleep_s=node.sleep.value,
            recalled_s=math.inf if recalled is None else (now.tag.time - recalled) / SECOND,
            train_s=self._batches.train_s(node.model),
            load_s=node.load.value,
        )
        verdict = policy.lend(state, self._settings)
        if verdict.yes:
            node.lent, node.lent_at, node.claimable = True, now.tag.time, False
            self._begin_switch(now, node, "lend", verdict.reason)
        elif verdict.claimable:
            self._mark_claimable(node, verdict.reason)

    def _consider_recall(self, now: Context, node: ProgramNode, awake: AwakeEngines) -> None:
        staying = sum(awake.of[model] - awake.lent[node.model, model] for model in self._models(node))
        state = policy.Lent(
            wait_s=self._batches.wait_s(node.model),
            awake=staying,
            sleep_s=node.sleep.value,
            lent_s=(now.tag.time - node.lent_at) / SECOND,
            train_s=self._batches.train_s(node.model),
            load_s=node.load.value,
        )
        verdict = policy.recall(state, self._settings)
        if verdict.yes:
            node.claimable, node.recalled_at = True, now.tag.time
            self._recall(now, node, verdict.reason)

    def _mark_claimable(self, node: ProgramNode, reason: str) -> None:
        """Mark a node that has no other use before the batch is whole."""
        if not node.claimable:
            node.claimable = True
            self._role(node, node.role, reason)

    def _models(self, node: ProgramNode) -> list[str]:
        return sorted({self._engines[engine].model for engine in node.engines})

    # Reports

    def _want(self, engine: str, awake: bool, reason: str) -> None:
        self._wanted[engine] = Wanted(engine, awake, reason)

    def _role(self, node: ProgramNode, role: Role, reason: str) -> None:
        node.role = role
        self._roles[node.name] = RoleChange(node.name, role, reason, node.claimable)

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
