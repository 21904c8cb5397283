"""A cluster in virtual time: engines, one trainer, groups of samples, and a policy that decides.

Owns the truth: where each sample is, what each engine runs, how far the trainer is, and the clock. Events are ends of
calls, ends of switches and steps, results of tools, and a tick each second for policies that want one; never tokens.
Everything follows from the seed, the scenario and the policy: two runs are equal to the last bit. Invariants:
- a sample is in one place: an engine, held, with a tool, on its way to an engine that opens, or over;
- an engine samples with the version that it was last given, and is open, loading, asleep or on its way between the two;
- the trainer trains batch `rule.next_batch` and nothing else, and only groups that occupy it;
- every sampled token is trained, wasted or underway at the end (`Meter`), once.

`World` calls the hooks of its `Policy` at every event; the policy responds by calling the world's verbs:
- groups: `start_group()`, and what to do with its samples: `route(sample, host)` or `hold(sample)`;
- engines: `sync(host, seconds)`, `move(sample, host)`, `give_back(sample)`, `look(host)`;
- nodes: `claim(hosts, seconds)`, `release(hosts, seconds)`;
- the trainer: `train()`, `publish(blocked_s)`.
Which groups may start, and in which batch each is trained, is decided by the staleness rule
(`scheduler.policies.staleflow`), the same state machine here and in the gateway. A policy does not know lengths.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Literal

from lab.simulate.engine import Call, Engine
from lab.simulate.entities import Group, Host, HostState, Layout, Sample
from lab.simulate.errors import Stalled
from lab.simulate.meter import Meter
from lab.simulate.scenario import Scenario
from lab.simulate.workload import Workload
from scheduler.policies.staleflow import StaleFlow
from scheduler.policies.staleness_events import (
    AbortEpisode,
    Command,
    Consume,
    Event,
    GroupDropped,
    Join,
    Leased,
    MemberDropped,
    Publish,
    Refuse,
    Reward,
    Skipped,
)
from scheduler.policies.staleness_state import LedgerSettings

TrainerState = Literal["waiting", "claiming", "training", "trained", "blocked"]


class Policy:
    """A scheduling policy: the simulator calls it at every event. What a policy leaves out does nothing."""

    name: str
    stream = 0
    """The parts in which the trainer takes a batch as it fills; 0: only when it is complete."""
    ticks = False
    """True if the policy wants `on_second`."""

    def layout(self, scenario: Scenario) -> Layout:
        """Divide the scenario's GPUs."""
        return Layout(rollout=scenario.gpus - scenario.train_gpus, train=scenario.train_gpus)

    def rule(self, scenario: Scenario) -> StaleFlow:
        """Return the rule that bounds staleness. Every group is trained as it is."""
        return StaleFlow(LedgerSettings(scenario.eta, scenario.batch, min_members=1))

    def on_room(self, world: World) -> None:
        """Start groups: the rule may admit some."""
        while world.room() and (group := world.start_group()):
            self.on_homeless(world, group.samples)

    def on_homeless(self, world: World, samples: Sequence[Sample]) -> None:
        """Route or hold samples without an engine.

        They were just started or returned, have their tool's result, or an engine opened while they were held.
        """

    def on_left(self, world: World, calls: Sequence[tuple[Sample, int, int]]) -> None:
        """Handle calls that need no engine any more: their turn has ended, or their sample is given up.

        `calls`: the sample, the number of its turn, the tokens of its context. Called before all hooks that follow from it.
        """

    def on_opened(self, world: World, host: Host) -> None:
        """Handle an engine that has loaded weights or has woken up."""

    def on_asleep(self, world: World, host: Host) -> None:
        """Handle a claimed engine that sleeps now."""

    def on_ready(self, world: World) -> None:
        """Call `train()`, now or once the nodes are ready: the trainer waits, and has something to train."""
        world.train()

    def on_trained(self, world: World) -> None:
        """Call `publish()`: a step has ended."""

    def on_published(self, world: World, version: int) -> None:
        """Handle newer weights."""

    def on_idle(self, world: World, host: Host) -> None:
        """Handle an open engine that has nothing to do."""

    def on_second(self, world: World) -> None:
        """Handle the tick of a second."""


class World:
    """One run. `run()` it; the policy calls the verbs."""

    def __init__(self, scenario: Scenario, policy: Policy, workload: Workload) -> None:
        self.scenario, self.policy, self.workload = scenario, policy, workload
        self.now = 0.0
        self.layout: Layout = policy.layout(scenario)
        self.rule = policy.rule(scenario)
        self.transfers = scenario.transfers(self.layout.train_gpus)
        self.trainer: TrainerState = "waiting"
        self.arrived = 0
        """The newest version that engines can have."""
        self.held: deque[Sample] = deque()
        self.hosts = self._made()
        self.meter = Meter(scenario, self.layout, [host.gpus for host in self.hosts])
        self.groups: dict[str, Group] = {}
        self._samples: dict[str, Sample] = {}
        self._numbers = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._touched: dict[Host, None] = {}
        self._homeless: list[Sample] = []
        self._left_calls: list[tuple[Sample, int, int]] = []
        self._changed: list[tuple[Callable[[World, Host], None], Host]] = []
        """Engines that opened or fell asleep, and which of the policy's hooks is for that."""
        self._room = self._look = True
        self._woken: dict[Host, None] = {}
        self._trained: list[str] = []

    # The loop

    def run(self, progress: Callable[[int, float], None] = lambda _batch, _now: None) -> Meter:
        """Train the scenario's batches. `progress` gets each, and the time. Raise Stalled if nothing can go on."""
        batches = self.scenario.batches
        if self.policy.ticks:
            self._after(1.0, self._second)
        self._calm()
        batch = 0
        while self.rule.next_batch < batches:
            if not self._events or (self.policy.ticks and len(self._events) == 1 and self._stands()):
                raise Stalled(self._where())
            self.now, _, happen = heappop(self._events)
            happen()
            # Engines that open at the same time are one choice for the policy.
            while self._events and self._events[0][0] == self.now:
                heappop(self._events)[2]()
            self._calm()
            if self.rule.next_batch > batch:
                batch = self.rule.next_batch
                progress(batch, self.now)
        self.meter.end(self.now, self._underway(), self.hosts)
        return self.meter

    # Verbs: groups and samples

    def room(self) -> int:
        """Return how many groups could start now."""
        return self.rule.free_slots()

    def start_group(self) -> Group | None:
        """Start the workload's next group; None if the rule refuses it. Its samples are for the caller to route or hold."""
        task, name = self.workload.task(self._numbers), f"g{self._numbers}"
        size = len(task.episodes)
        group = Group(name, self.rule.version)
        for i, turns in enumerate(task.episodes):
            sample = Sample(f"{group.name}.{i}", group, turns)
            commands = self._apply_event(Join(group.name, sample.name, size))
            if any(isinstance(command, Refuse) for command in commands):
                return None
            sample.call = Call(sample, turns[0].prompt, turns[0].sampled)
            group.samples.append(sample)
            self._samples[sample.name] = sample
        self.groups[group.name] = group
        self._numbers += 1
        return group

    def route(self, sample: Sample, host: Host) -> None:
        """Send the sample to an engine, where it continues as soon as the engine is open."""
        assert sample.host is None and not sample.over
        sample.host = host
        if host.state == "open":
            self._enter(sample, host)
        else:
            host.kept.append(sample)

    def hold(self, sample: Sample) -> None:
        """Hold the sample until an engine opens (or the policy takes it from `held`)."""
        self.held.append(sample)

    def move(self, sample: Sample, host: Host, carry: bool = False) -> None:
        """Move the sample to another engine, which prefills its prompt again unless its cache moves too (`carry`)."""
        if self._take_out(sample):
            self._turn_over(sample)
        else:
            sample.carried = carry
            self.route(sample, host)

    def give_back(self, sample: Sample) -> None:
        """Remove the sample from its engine; the policy routes it again."""
        if self._take_out(sample):
            self._turn_over(sample)
        else:
            self._homeless.append(sample)

    def look(self, host: Host) -> Engine:
        """Return the engine's present state."""
        if host.state == "open":
            host.engine.advance(self.now)
            self._touch(host)
        return host.engine

    def last_host(self, sample: Sample) -> Host | None:
        """Return the open engine that has the sample's conversation in its cache, under its present version; None: no engine."""
        if sample.cached_at is None or not sample.at:
            return None
        host = self.hosts[sample.cached_at[0]]
        return host if host.state == "open" and host.version == sample.cached_at[1] else None

    def open_hosts(self) -> list[Host]:
        """Return the engines that accept calls."""
        return [host for host in self.hosts if host.state == "open"]

    # Verbs: engines and nodes

    def sync(self, host: Host, seconds: float, keep: bool = True) -> None:
        """Load the newest weights into an open engine. Its calls continue there (`keep`), or return to the policy now."""
        assert host.state == "open"
        version = self.arrived
        self._close(host, "loading", keep)
        self._after(seconds, lambda: self._opened(host, version))

    def claim(self, hosts: Iterable[Host], seconds: float) -> None:
        """Put open engines to sleep, after which the trainer has their GPUs. Their calls return to the policy.

        `on_ready` is called again once no engine is switching any more.
        """
        self.trainer = "claiming"
        for host in hosts:
            assert host.state == "open" and host.shared
            self._close(host, "switching", keep=False)
            self._after(seconds, lambda host=host: self._asleep(host))  # type: ignore[misc]

    def release(self, hosts: Iterable[Host], seconds: float) -> None:
        """Wake sleeping engines with the newest weights."""
        version = self.arrived
        for host in hosts:
            assert host.state == "asleep"
            host.state = "switching"
            self._touch(host)
            self._after(seconds, lambda host=host: self._opened(host, version))  # type: ignore[misc]

    # Verbs: the trainer

    def ready(self) -> int:
        """Return how many groups of the batch the trainer could begin with now."""
        batch = self.rule.next_batch
        entered = len(self.rule.entries(batch))
        if self.rule.complete(batch):
            return entered - len(self._trained)
        parts = self.policy.stream
        part = -(-self.scenario.batch // parts) if parts else 0
        untrained = entered - len(self._trained)
        return untrained // part * part if parts else 0

    def train(self) -> None:
        """Train the groups that are ready."""
        assert self.trainer in ("waiting", "claiming") and self.ready()
        assert all(host.state == "asleep" for host in self.hosts if host.shared) or not self.layout.both
        batch = self.rule.next_batch
        if not self._trained:
            self._apply_event(Leased(batch))
        names = self.rule.entries(batch)[len(self._trained) :][: self.ready()]
        self._trained += names
        samples = [s for name in names for s in self.groups[name].samples if not s.dropped]
        tokens = sum(sample.context for sample in samples)
        seconds = self.scenario.trainer.seconds(tokens, self.layout.train_gpus)
        self._trainer_is("training")
        self._after(seconds, self._part_done)

    def publish(self, blocked_s: float, delay_s: float = 0.0) -> None:
        """Publish the step's weights, which arrive after `delay_s`; the trainer does nothing for `blocked_s`."""
        assert self.trainer == "trained"
        batch = self.rule.next_batch
        self._trainer_is("blocked")
        self._after(blocked_s, lambda: self._trainer_is("waiting"))
        trained = [self.groups.pop(name) for name in self.rule.entries(batch)]
        self.meter.trained(self.now, batch, trained)
        self._trained = []
        if not delay_s:
            self._arrive(batch + 1)
        self._apply_event(Consume(batch))
        if delay_s:
            self._after(delay_s, lambda: self._arrive(batch + 1))

    # Events

    def _calm(self) -> None:
        """Call the policy's hooks until none is due, then schedule the next event of every engine that changed."""
        while True:
            if self._left_calls:
                calls, self._left_calls = self._left_calls, []
                self.policy.on_left(self, calls)
            elif self._changed:
                hook, host = self._changed.pop(0)
                hook(self, host)
            elif self._homeless:
                samples, self._homeless = [s for s in self._homeless if not s.over], []
                if samples:
                    self.policy.on_homeless(self, samples)
            elif self._room:
                self._room = False
                self.policy.on_room(self)
            elif self._look and self.trainer == "waiting":
                self._look = False
                if self.ready():
                    self.policy.on_ready(self)
            elif self._woken:
                host = next(iter(self._woken))
                del self._woken[host]
                if host.state == "open" and not host.engine.load:
                    self.policy.on_idle(self, host)
            else:
                break
        for host in self._touched:
            self._watch(host)
        self._touched.clear()

    def _watch(self, host: Host) -> None:
        host.serial += 1
        busy = host.engine.running > 0
        role = "rollout" if busy else "idle"
        if host.state != "open":
            role = "switching" if host.state != "asleep" else "lent"
        self.meter.host_is(self.now, host.number, host.gpus, role)
        due = host.engine.next_event() if host.state == "open" else None
        if due is not None:
            self._at(due, lambda serial=host.serial: self._engine_event(host, serial))  # type: ignore[misc]

    def _engine_event(self, host: Host, serial: int) -> None:
        if serial != host.serial or host.state != "open":
            return
        ended = [call.owner for call in host.engine.settle(self.now)]
        self._touch(host)
        for sample in ended:
            self._left(sample)
        self._end_turns(ended)
        if not host.engine.load:
            self._woken[host] = None

    def _end_turns(self, samples: Sequence[Sample]) -> None:
        """End the turns of samples that have left their engine; the end of one may abort others."""
        for sample in samples:
            if not sample.over:
                self._turn_over(sample)

    def _turn_over(self, sample: Sample) -> None:
        turn = sample.turns[sample.at]
        self._left_calls.append((sample, sample.at, sample.call.context))
        sample.at += 1
        if sample.at == len(sample.turns):
            sample.over = True
            self._apply_event(Reward(sample.name))
            return
        following = sample.turns[sample.at]
        context = sample.call.prompt + turn.sampled + following.prompt
        sample.call = Call(sample, context, following.sampled)
        self._after(turn.wait_s, lambda: self._wants(sample))

    def _arrive(self, version: int) -> None:
        self.arrived = version
        self._apply_event(Publish(version))
        self.policy.on_published(self, version)

    def _wants(self, sample: Sample) -> None:
        if not sample.over:
            self._homeless.append(sample)

    def _opened(self, host: Host, version: int) -> None:
        host.state, host.version = "open", version
        host.engine.advance(self.now)
        self._changed.append((self.policy.on_opened, host))
        kept, host.kept = [sample for sample in host.kept if not sample.over], []
        self._touch(host)
        for sample in kept:
            self._enter(sample, host)
        if not kept:
            self._woken[host] = None
        self._homeless += self.held
        self.held.clear()
        self._room = True
        self._claimed()

    def _asleep(self, host: Host) -> None:
        host.state = "asleep"
        self._changed.append((self.policy.on_asleep, host))
        self._touch(host)
        self._claimed()

    def _claimed(self) -> None:
        self._look = True
        if self.trainer == "claiming" and all(h.state in ("asleep", "open") for h in self.hosts if h.shared):
            self.trainer = "waiting"

    def _part_done(self) -> None:
        self._trainer_is("waiting")
        batch = self.rule.next_batch
        if self.rule.complete(batch) and len(self._trained) == len(self.rule.entries(batch)):
            self._trainer_is("training")
            self._after(self.scenario.trainer.step_s, self._step_done)

    def _step_done(self) -> None:
        self._trainer_is("trained")
        self.policy.on_trained(self)

    def _second(self) -> None:
        self._after(1.0, self._second)
        self.policy.on_second(self)

    # Samples and engines

    def _enter(self, sample: Sample, host: Host) -> None:
        call, group, here = sample.call, sample.group, (host.number, host.version)
        call.cached = 0
        if sample.cached_at == here and not host.engine.waiting:
            call.cached = call.prompt - sample.turns[sample.at].prompt
        elif here in group.cached_at:
            call.cached = sample.turns[0].prompt
        if sample.carried:
            here_before = call.context if call.done else call.prompt - sample.turns[sample.at].prompt
            call.cached = max(call.cached, here_before)
            sample.carried = False
        group.cached_at.add(here)
        sample.cached_at = here
        sample.since = call.done
        host.engine.add(self.now, call)
        self._touch(host)

    def _left(self, sample: Sample) -> None:
        """Book what was sampled in the engine that the sample has left."""
        host, sampled = sample.host, sample.call.done - sample.since
        assert host is not None
        if sampled:
            sample.spans.append((host.version, sampled))
            self.meter.sampled += sampled
        sample.since, sample.host = sample.call.done, None

    def _take_out(self, sample: Sample) -> bool:
        """Remove a sample; return true if its turn ended with the running step."""
        host = sample.host
        assert host is not None
        if host.state == "open":
            host.engine.remove(self.now, sample.call)
            self._left(sample)
            self._touch(host)
        else:
            host.kept.remove(sample)
            sample.host = None
        sample.cached_at = None
        return sample.call.done == sample.call.want

    def _close(self, host: Host, state: HostState, keep: bool) -> None:
        samples: list[Sample] = [call.owner for call in host.engine.drain(self.now)]
        host.state = state
        self._touch(host)
        for sample in samples:
            self._left(sample)
            sample.cached_at = None
        ended = [sample for sample in samples if sample.call.done == sample.call.want]
        self._end_turns(ended)
        rest = [sample for sample in samples if not sample.over and sample not in ended]
        for sample in rest if keep else []:
            sample.host = host
            host.kept.append(sample)
        self._homeless += [] if keep else rest

    def _touch(self, host: Host) -> None:
        self._touched[host] = None

    # The rule

    def _apply_event(self, event: Event) -> list[Command]:
        commands = self.rule.apply(event)
        for command in commands:
            match command:
                case AbortEpisode(name) | MemberDropped(name):
                    self._samples[name].dropped = True
                    self._abort(self._samples[name])
                case GroupDropped(name):
                    self._drop(name)
                case Skipped(_, _, names):
                    for name in names:
                        self._drop(name)
        if not isinstance(event, Join):
            self._room = self._look = True
        return commands

    def _drop(self, name: str) -> None:
        group = self.groups.pop(name)
        for sample in group.samples:
            self._abort(sample)
        self.meter.wasted += sum(sample.tokens for sample in group.samples)

    def _abort(self, sample: Sample) -> None:
        if sample.over:
            return
        sample.over = True
        if sample.host is not None:
            self._take_out(sample)
        elif sample in self.held:
            self.held.remove(sample)
        self._left_calls.append((sample, sample.at, sample.call.context))

    # Time

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        self._serial += 1
        heappush(self._events, (time, self._serial, happen))

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        self._at(self.now + seconds, happen)

    def _trainer_is(self, state: TrainerState) -> None:
        self.trainer, self._look = state, True
        self.meter.trainer_is(self.now, {"training": "train", "blocked": "switching"}.get(state, "idle"))

    # Ends

    def _made(self) -> list[Host]:
        sizes = self.scenario.engines(self.layout.rollout, self.layout.both)
        costs = {gpus: self.scenario.engine_on(gpus) for gpus in sizes}
        first = len(sizes) - self.layout.both // self.scenario.engine_gpus
        return [Host(f"e{i}", i, n, Engine(costs[n]), shared=i >= first) for i, n in enumerate(sizes)]

    def _underway(self) -> int:
        """Return the tokens of groups that were neither trained nor dropped."""
        tokens = 0
        for sample in [sample for group in self.groups.values() for sample in group.samples]:
            tokens += sample.tokens
            if sample.host is not None and sample.host.state == "open":
                sample.host.engine.advance(self.now)
                new = sample.host.engine.sampled(sample.call) - sample.since
                tokens, self.meter.sampled = tokens + new, self.meter.sampled + new
        return tokens

    def _stands(self) -> bool:
        return self.trainer == "waiting" and not any(host.engine.load for host in self.hosts)

    def _where(self) -> str:
        states = ", ".join(sorted({host.state for host in self.hosts}))
        return (
            f"{self.policy.name}: batch {self.rule.next_batch} is never trained; the trainer is {self.trainer}, "
            f"engines are {states}, {len(self.held)} samples are held, {self.rule.free_slots()} groups could start"
        )
