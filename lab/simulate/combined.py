"""headgate's own policy: the very reactors of the gateway (`scheduler.program`), in virtual time over a simulated cluster.

Nothing is decided here. A `ControlProgram` receives the world's events as from the gateway's hosts
(`gateway/control/{host,placement,nodes}.py`), and its commands are executed with the world's verbs:
- StaleFlow's ledger bounds staleness;
- calls go where they add most tokens a second, wait here and not in engines, and move (`placement`, `migration`);
- engines pull weights one by one (`sync`);
- nodes that train are lent to rollout while the trainer waits (`lending`);
- the trainer takes groups as they finish once it has its nodes, as `trainer/loop/run.py` does.

The program receives only what a gateway can know: lengths are predicted by `foresight.py`, an engine's coefficients are those
that a fit would find, and engines are observed once a second.

Owns what the program was notified of and has not seen the end of: calls, steps that take time, and the trainer's claim of its
nodes. Knobs: `Knobs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lab.simulate.entities import Host, Layout, Sample
from lab.simulate.errors import SimulationError
from lab.simulate.foresight import Foresight
from lab.simulate.hosting import Hosting
from lab.simulate.scenario import Scenario
from lab.simulate.world import World
from scheduler.policies.migration import MigrationSettings
from scheduler.policies.placement import Choice
from scheduler.policies.staleflow import StaleFlow
from scheduler.policies.staleness_base import StalenessRule
from scheduler.policies.staleness_state import LedgerSettings
from scheduler.policies.sync import SyncSettings
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


_CHOICE, _PULLS, _MOVES = Choice(), SyncSettings(), MigrationSettings()


@dataclass(frozen=True, slots=True)
class Knobs:
    """The settings of a gateway that the simulation varies; the defaults are the gateway's own."""

    min_gain_share: float = _CHOICE.min_gain_share
    late_call_weight: float = _CHOICE.late_call_weight
    running_below: int = _PULLS.running_below
    rate_below: float = _PULLS.rate_below
    pull_at_once: float = _PULLS.at_once
    migrate: bool = _MOVES.on
    moves: int = _MOVES.per_engine
    """The most calls that move in a second, for each engine."""
    lend: bool = True
    recall_ahead_share: float = 1.0
    """`[lending] recall_ahead_share`."""
    admit: Literal["newest", "engine"] = "newest"
    """The version of a group that starts (`[routing] group_version`)."""
    share: float = 0.0
    """The share of GPUs that train and are lent; 0 for the scenario's."""


class Combined:
    """headgate's own policy: the gateway's control program in simulated time."""

    name = "combined"
    stream = 64
    recompute = False
    ticks = True

    def __init__(self, recording: Path | None = None, knobs: Knobs | None = None) -> None:
        """Prepare a policy for one run. `recording`: a file that `scheduler replay` accepts; `close` ends it."""
        self._path, self._knobs = recording, knobs or Knobs()
        self._foresight = Foresight()
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
        if not self._knobs.lend:
            return Layout(rollout=scenario.gpus - train, train=train)
        return Layout(rollout=scenario.gpus - train, train=0, both=train)

    def train_gpus(self, scenario: Scenario) -> int:
        """Return the GPUs that train: the scenario's, unless a setting overrides it."""
        size = scenario.engine_gpus
        return round(scenario.gpus * self._knobs.share / size) * size or scenario.train_gpus

    def rule(self, scenario: Scenario) -> StalenessRule:
        """Build the program, and return StaleFlow's ledger."""
        self._hosting = Hosting(self._settings(scenario), self._path)
        program = self._hosting.program
        self._fleet, self._update = program.fleets[MODEL], program.updates[MODEL]
        self._placement, self._lending = program.placements[MODEL], program.lending
        self._hosting.want(self._fleet.commands)
        self._hosting.want(self._update.commands)
        self._hosting.want(self._placement.placed)
        self._hosting.want(self._placement.moves)
        self._hosting.observe(self._lending.roles, self._on_roles)
        self._hosting.start()
        return StaleFlow(LedgerSettings(scenario.eta, scenario.batch, min_members=1))

    def _settings(self, scenario: Scenario) -> dict[str, Any]:
        knobs, engine = self._knobs, scenario.engine
        placement = {
            "rule": _CHOICE.rule,
            "min_gain_share": knobs.min_gain_share,
            "late_call_weight": knobs.late_call_weight,
            "engine": asdict(engine.model),
            "sync": {
                "running_below": knobs.running_below,
                "rate_below": knobs.rate_below,
                "at_once": knobs.pull_at_once,
            },
            "migration": {
                "on": knobs.migrate,
                "per_engine": knobs.moves,
            },
        }
        model = {
            "update": {"order": "pull", "mode": "abort"},
            "placement": placement,
            "ledger": {},
        }
        return {"models": {MODEL: model}, "lending": {"recall_ahead_share": knobs.recall_ahead_share}}

    def close(self) -> None:
        """End the recording."""
        self._hosting.close()

    # Events

    def on_room(self, world: World) -> None:
        """Start the groups that may start."""
        if not self._hosts:
            self._begin(world)
        samples: list[Sample] = []
        while world.room() and (group := world.start_group(self._admitting(world))):
            samples += group.samples
            if self._knobs.admit == "engine":  # the next group sees where this one went
                self.on_homeless(world, samples)
                samples = []
        self.on_homeless(world, samples)

    def _admitting(self, world: World) -> int | None:
        """Return the version of the engine that would sample a new group's call; None: the group gets the newest."""
        if self._knobs.admit == "newest":
            return None
        return self._placement.admitting(max(world.rule.next_batch - world.scenario.eta, 0))

    def on_homeless(self, world: World, samples: Sequence[Sample]) -> None:
        """Report new calls, and those that an engine gave back."""
        if samples:
            arrived = tuple(self._arrived(world, sample) for sample in samples)
            self._hosting.inject(self._placement.demand, Demand(arrived=arrived))
        self._do_all(world)

    def on_left(self, world: World, calls: Sequence[tuple[Sample, int, int]]) -> None:
        """Report calls that ended, and learn their lengths."""
        left = []
        for sample, turn, context in calls:
            name = f"{sample.name}/{turn}"
            if self._calls.pop(name, None) is not None:
                left.append(CallDeparted(name, context))
                self._targets.pop(name, None)
                if sample.at > turn:
                    self._foresight.learn(sample.turns[turn].sampled)
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
        tokens = sum(world.scenario.trained(sample.context) for sample in samples)
        busy_s = world.scenario.trainer.seconds(tokens, world.layout.train_gpus, world.recompute)
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

    def on_idle(self, world: World, host: Host) -> None:
        """Do nothing: `on_second` reports it."""

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
        expected = self._foresight.expect(sample.predicted)
        last = world.last_host(sample)
        return Arrived(
            name,
            sample.group.version,
            sample.call.context,
            expected=max(expected - sample.call.done, 1) if expected else 0,
            cached_in=last.name if last else "",
            cached=sample.call.prompt - sample.turns[sample.at].prompt if last else 0,
            preferred=self._targets.pop(name, ""),
        )

    def _fill(self, world: World) -> None:
        self._hosting.inject(
            self._lending.filling,
            Filling.of(MODEL, world.rule, len(self._calls), longest_s=self._placement.longest_s),
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
