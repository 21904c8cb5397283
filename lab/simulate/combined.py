"""headgate's own policy: the very reactors of the gateway (`scheduler.program`), in virtual time over a simulated cluster.

Nothing is decided here. A `ControlProgram` receives the world's events as from the gateway's hosts
(`gateway/control/{host,placement,nodes}.py`), and its commands are executed with the world's verbs:
- StaleFlow's ledger bounds staleness;
- calls go where they add most tokens a second, wait here and not in engines, and move (`placement`, `migration`);
- engines pull weights one by one (`sync`);
- nodes that train are lent to rollout while the trainer waits (`lending`);
- the trainer takes groups as they finish once it has its nodes, as `trainer/loop/run.py` does.

The program has the gateway's default settings and receives only what a gateway can know: an engine's coefficients are those that
a fit would find, and engines are observed once a second.

Owns what the program was notified of and has not seen the end of: calls, steps that take time, and the trainer's claim of its
nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lab.simulate.entities import Host, Layout, Sample
from lab.simulate.errors import SimulationError
from lab.simulate.hosting import Hosting
from lab.simulate.scenario import Scenario
from lab.simulate.world import Policy, World
from scheduler.policies.staleflow import StaleFlow
from scheduler.program.calls import (
    Arrived,
    CallDeparted,
    Closed,
    Demand,
    EngineLoad,
    Move,
    Opened,
    Placed,
    Snapshot,
    SpeedFitted,
)
from scheduler.program.events import Added, Published, Started, StepCommand, StepResult
from scheduler.program.nodes import Claimed, Filling, Hosted, NodeAdded, Released, RoleChange

MODEL = "model"
MACHINE = 8
"""GPUs of a machine: a node, which is lent as a whole."""
_RENEW_S = 10
"""Seconds between the claims by which a trainer keeps its nodes."""
_FLEET_STEPS = ("launch", "sleep", "stop", "wake")
_AWAITED = {"load": "open", "launch": "open", "wake": "open", "sleep": "asleep", "stop": "asleep"}
"""The state of an engine after a step that takes time."""


class Combined(Policy):
    """headgate's own policy: the gateway's control program in simulated time."""

    name = "combined"
    stream = 64
    ticks = True

    def __init__(
        self,
        recording: Path | None = None,
        placement: Mapping[str, Any] = MappingProxyType({}),
        lending: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Prepare a policy for one run.

        `recording`: a file that `scheduler replay` accepts; `close` ends it. `placement`, `lending`: settings of the program that
        are not its defaults.
        """
        self._path, self._given = recording, (placement, lending)
        self._calls: dict[str, Sample] = {}
        """Calls that run or wait, by name."""
        self._targets: dict[str, str] = {}
        """The engines that moving calls are expected to go to."""
        self._steps: dict[str, StepCommand] = {}
        """Steps that take time, by engine."""
        self._roles: dict[str, RoleChange] = {}
        """The roles of the nodes that the trainer needs."""
        self._claims = False
        """The trainer has claimed its nodes, or has them."""
        self._hosts: dict[str, Host] = {}
        self._doing = False

    def layout(self, scenario: Scenario) -> Layout:
        """Return the split of the GPUs: the nodes that train have both tags."""
        train = self.train_gpus(scenario)
        return Layout(rollout=scenario.gpus - train, train=0, both=train)

    def train_gpus(self, scenario: Scenario) -> int:
        """Return the number of GPUs that train."""
        return scenario.train_gpus

    def rule(self, scenario: Scenario) -> StaleFlow:
        """Build the program, and return the ledger."""
        self._hosting = Hosting(self.settings(scenario), self._path)
        program = self._hosting.program
        self._fleet, self._update = program.fleets[MODEL], program.updates[MODEL]
        self._placement, self._lending = program.placements[MODEL], program.lending
        self._hosting.want(self._fleet.commands)
        self._hosting.want(self._update.commands)
        self._hosting.want(self._placement.placed)
        self._hosting.want(self._placement.moves)
        self._hosting.observe(self._lending.roles, self._on_roles)
        self._hosting.start()
        return super().rule(scenario)

    def settings(self, scenario: Scenario) -> dict[str, Any]:
        """Return the program's settings: its defaults, the engines' speed, and what was given."""
        placement, lending = self._given
        model = {
            "update": {"order": "pull", "mode": "abort"},
            "placement": {"engine": asdict(scenario.engine.model), **placement},
            "ledger": {},
        }
        return {"models": {MODEL: model}, "lending": dict(lending)}

    def close(self) -> None:
        """End the recording."""
        self._hosting.close()

    # Events

    def on_room(self, world: World) -> None:
        """Start the groups that may start."""
        if not self._hosts:
            self._begin(world)
        samples: list[Sample] = []
        while world.room() and (group := world.start_group()):
            samples += group.samples
        self.on_homeless(world, samples)

    def on_homeless(self, world: World, samples: Sequence[Sample]) -> None:
        """Report new calls, and those that an engine gave back."""
        if samples:
            arrived = tuple(self._arrived(world, sample) for sample in samples)
            self._hosting.inject(self._placement.demand, Demand(arrived=arrived))
        self._do_all(world)

    def on_left(self, world: World, calls: Sequence[tuple[Sample, int, int]]) -> None:
        """Report calls that ended."""
        left = []
        for sample, turn, context in calls:
            name = f"{sample.name}/{turn}"
            if self._calls.pop(name, None) is not None:
                left.append(CallDeparted(name, context))
                self._targets.pop(name, None)
        if left:
            self._hosting.inject(self._placement.demand, Demand(left=tuple(left)))
        self._do_all(world)

    def on_opened(self, world: World, host: Host) -> None:
        """Finish the engine's step, or begin the next one."""
        self._go_on(world, host, sleeps=False)

    def on_asleep(self, world: World, host: Host) -> None:
        """Finish the engine's step, or begin the next one."""
        self._go_on(world, host, sleeps=True)

    def on_ready(self, world: World) -> None:
        """Claim the trainer's nodes when the batch is complete or all were recalled; train once it has them."""
        claimable = all(role.claimable for role in self._roles.values())
        if not self._claims and (claimable or world.rule.complete(world.rule.next_batch)):
            self._fill(world)
            self._claim()
        self._do_all(world)
        has_nodes = self._claims and all(role.role == "train" for role in self._roles.values())
        if has_nodes and all(host.state == "asleep" for host in world.hosts if host.shared):
            world.train()

    def on_trained(self, world: World) -> None:
        """Push the weights into host memory, from where they travel in the background, and release the nodes."""
        transfers = world.transfers
        batch = [world.groups[name] for name in world.rule.entries(world.rule.next_batch)]
        samples = [sample for group in batch for sample in group.samples if not sample.dropped]
        tokens = sum(sample.context for sample in samples)
        busy_s = world.scenario.trainer.seconds(tokens, world.layout.train_gpus)
        world.publish(transfers.push_s, delay_s=transfers.delay_s)
        self._claims = False
        self._fill(world)
        for node in self._roles:
            self._hosting.inject(self._lending.released, Released(node, MODEL, busy_s))
        self._do_all(world)

    def on_published(self, world: World, version: int) -> None:
        """Handle a published version."""
        self._hosting.inject(self._update.published, Published(version))
        self._do_all(world)

    def on_second(self, world: World) -> None:
        """Report the engines and how full the batch is, and renew the trainer's claim."""
        engines = tuple(
            _engine_load(world, host) for host in world.open_hosts() if host.name not in self._steps
        )
        self._hosting.inject(self._placement.snapshot, Snapshot(engines))
        self._fill(world)
        if self._claims and round(world.now) % _RENEW_S == 0:
            self._claim()
        self._do_all(world)
        if world.trainer == "waiting" and world.ready():
            self.on_ready(world)  # the nodes may have been recalled in the meantime

    # Reports

    def _begin(self, world: World) -> None:
        """Report the cluster."""
        inject = self._hosting.inject
        self._hosting.clock = lambda: world.now
        self._hosts = {host.name: host for host in world.hosts}
        inject(self._fleet.started, Started(0))
        inject(self._update.started, Started(0))
        inject(self._placement.started, Started(0))
        first = next((host.number for host in world.hosts if host.shared), 0)
        for host in world.hosts:
            if host.gpus != world.scenario.engine_gpus:
                inject(self._placement.fitted, SpeedFitted(host.name, host.engine.costs.model))
            if host.shared:
                node = f"n{(host.number - first) * host.gpus // max(MACHINE, host.gpus)}"
                if node not in self._roles:
                    inject(self._lending.added, NodeAdded(node, ("train", "rollout")))
                    inject(self._lending.released, Released(node, MODEL))
                inject(self._lending.hosted, Hosted(host.name, node))
            inject(self._fleet.added, Added(host.name))
        self._do_all(world)

    def _arrived(self, world: World, sample: Sample) -> Arrived:
        name = f"{sample.name}/{sample.at}"
        self._calls[name] = sample
        last = world.last_host(sample)
        return Arrived(
            name,
            sample.group.version,
            sample.call.context,
            cached_in=last.name if last else "",
            cached=sample.call.prompt - sample.turns[sample.at].prompt if last else 0,
            preferred=self._targets.pop(name, ""),
        )

    def _fill(self, world: World) -> None:
        self._hosting.inject(
            self._lending.filling,
            Filling.of(MODEL, world.rule, len(self._calls)),
        )

    def _claim(self) -> None:
        self._claims = True
        for node in self._roles:
            self._hosting.inject(self._lending.claimed, Claimed(node, MODEL))

    def _on_roles(self, roles: tuple[RoleChange, ...]) -> None:
        self._roles.update((role.node, role) for role in roles)

    # Commands

    def _do_all(self, world: World) -> None:
        """Execute the program's commands until there are no more."""
        if self._doing:
            return
        self._doing = True
        while self._hosting.wanted:
            match self._hosting.wanted.popleft():
                case StepCommand() as do:
                    self._act(world, do)
                case Placed(call, engine):
                    self._place(world, call, self._hosts[engine])
                case Move(call, engine, target):
                    self._move(world, call, self._hosts[engine], target)
        self._doing = False

    def _act(self, world: World, do: StepCommand) -> None:
        host, transfers = self._hosts[do.engine], world.transfers
        match do.step:
            case "hold":
                self._hosting.inject(self._placement.closed, Closed(do.engine))
            case "load":
                world.sync(host, transfers.pull_s, keep=False)
            case "open":
                self._hosting.inject(self._placement.opened, Opened(do.engine, do.version))
            # An engine that is stopped during its launch is launched again, as if it woke
            case "sleep" | "stop":
                self._hosting.inject(self._placement.closed, Closed(do.engine))
                if host.state == "open":
                    world.claim([host], transfers.to_train_s)
            case "launch" | "wake" if host.state == "asleep":
                world.release([host], transfers.to_rollout_s)
            case "drain" | "quarantine":
                raise SimulationError(f"{do.engine} has failed, and no engine fails here: {do.reason}")
        awaited = _AWAITED.get(do.step)
        if awaited in (None, host.state):
            self._report_end(do)
        else:
            self._steps[do.engine] = do

    def _go_on(self, world: World, host: Host, sleeps: bool) -> None:
        """Report the end of the step that waits for this state of the engine, or begin the next one."""
        do = self._steps.pop(host.name, None)
        if do is not None and (_AWAITED[do.step] == "asleep") == sleeps:
            self._report_end(do)
        elif do is not None:
            self._act(world, do)
        self._do_all(world)

    def _report_end(self, do: StepCommand) -> None:
        reactor = self._fleet if do.step in _FLEET_STEPS else self._update
        self._hosting.inject(reactor.step_result, StepResult(do.engine, do.step, do.version))

    def _place(self, world: World, call: str, host: Host) -> None:
        """Route a call; if its engine is not open any more, request a new place, as the gateway does."""
        sample = self._calls.get(call)
        if sample is None or sample.over or sample.host is not None:
            return
        if host.state == "open":
            world.route(sample, host)
        else:
            self.on_homeless(world, [sample])

    def _move(self, world: World, call: str, host: Host, target: str) -> None:
        sample = self._calls.get(call)
        if sample is not None and sample.host is host and host.state == "open":
            self._targets[call] = target
            world.give_back(sample)


def _engine_load(world: World, host: Host) -> EngineLoad:
    engine = world.look(host)
    return EngineLoad(host.name, engine.running, len(engine.waiting), engine.kv, engine.rate())
