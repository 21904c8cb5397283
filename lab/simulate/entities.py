"""The parts of a simulated cluster: the layout of its GPUs, engines on hosts, and groups of samples.

Data only: `World` changes them, `Meter` counts them, policies read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lab.simulate.engine import Call, Engine
from lab.simulate.workload import Turn

HostState = Literal["open", "loading", "asleep", "switching"]


@dataclass(frozen=True, slots=True)
class Layout:
    """The split of GPUs. Engines on GPUs of both kinds sleep while the trainer uses these."""

    rollout: int
    train: int
    both: int = 0

    @property
    def train_gpus(self) -> int:
        """The GPUs that compute a step."""
        return self.train + self.both


@dataclass(slots=True, eq=False)
class Host:
    """An engine and the GPUs it lives on."""

    name: str
    number: int
    gpus: int
    engine: Engine
    shared: bool
    """The trainer works on its GPUs too."""
    state: HostState = "open"
    version: int = 0
    kept: list[Sample] = field(default_factory=list)
    """Samples that go on here once it is open."""
    serial: int = 0


@dataclass(slots=True, eq=False)
class Sample:
    """An episode."""

    name: str
    group: Group
    turns: tuple[Turn, ...]
    at: int = 0
    """The turn that it is in."""
    call: Call = field(init=False)
    host: Host | None = None
    since: int = 0
    """Tokens of its call when it entered its host."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Versions, and how many tokens each sampled."""
    cached_at: tuple[int, int] | None = None
    """The number of the engine that has its turns in its cache, and the version that it ran."""
    carried: bool = False
    """Its cache goes with it to the next engine that it enters."""
    over: bool = False
    dropped: bool = False
    """True if the sample is never trained, even if its group is."""

    @property
    def context(self) -> int:
        """Tokens of the whole conversation, so far: what the trainer computes on."""
        return self.call.context

    @property
    def tokens(self) -> int:
        """Sampled tokens, without those of its present stay."""
        return sum(n for _, n in self.spans)


@dataclass(slots=True, eq=False)
class Group:
    """A group: its samples, and the version that it was started under."""

    name: str
    version: int
    samples: list[Sample] = field(default_factory=list)
    cached_at: set[tuple[int, int]] = field(default_factory=set)
    """Engines and their versions that have its prompt in their cache."""
