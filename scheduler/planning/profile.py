"""The input of a plan: a TOML file, keys typed and bounded, unknown keys refused; docs/topics/scheduler.md has an example."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from headgate.configuration import (
    Section,
    Unreadable,
    complaints,
    read_toml,
)
from scheduler.cluster import sharing
from scheduler.policies.allocation import Hardware, Points, Pool, Sampling, Site, Stage, Training
from scheduler.policies.throughput import COEFFICIENTS, EngineModel

Positive = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Nodes = Annotated[int, Field(ge=1, le=100_000)]
Measured = Annotated[dict[Nodes, Positive], Field(min_length=1)]


class BadProfile(Exception):
    """No plan can be made of it; the message names what is wrong."""


class WorkSettings(Section):
    """`[batch]`: one training batch. Needed where a stage is a model and was not measured at numbers of nodes."""

    samples: int = Field(ge=1, le=10**9)
    """Replies."""
    prompt_tokens: NotNegative = 0.0
    """Mean tokens before a reply."""
    reply_tokens: Positive
    """Mean tokens of a reply."""
    longest_tokens: NotNegative = 0.0
    """Tokens of the longest reply of a batch."""
    eta: int = Field(0, ge=0, le=64)
    """The bound on staleness: the longest reply may take as long as eta + 1 batches."""


class GenerationSettings(Section):
    """`[generation]` or `[sizes.NAME]`: seconds measured at numbers of nodes, or the coefficients of an engine."""

    seconds: Measured | None = None
    """`{ 1 = 410.0, 2 = 212.5 }`: nodes, and how long a batch takes on them."""
    s_per_kv_token: NotNegative | None = None
    """Seconds of a decode step for each cached token (`scheduler.policies.throughput`)."""
    s_per_batch: NotNegative | None = None
    """Seconds of a decode step for the batch at least."""
    s_per_call: NotNegative | None = None
    """Seconds of a decode step for each running call."""
    s_per_step: NotNegative | None = None
    """Seconds of every decode step."""
    engines: int = Field(1, ge=1, le=1024)
    """Engines per node."""
    max_running: int = Field(256, ge=1, le=1_000_000)
    """Replies that an engine samples concurrently."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        given = [getattr(self, name) is not None for name in COEFFICIENTS]
        if any(given) == (self.seconds is not None) or any(given) != all(given):
            raise ValueError(f"either `seconds`, or all of {', '.join(COEFFICIENTS)}")
        return self


class TrainingSettings(Section):
    """`[training]`: seconds measured at numbers of nodes, or the time of a token and of a step."""

    seconds: Measured | None = None
    """`{ 1 = 300.0, 2 = 160.0 }`: nodes, and how long a batch takes on them."""
    token_s: Positive | None = None
    """Seconds for one token on one node."""
    fixed_s: NotNegative = 0.0
    """Seconds that every step costs, on any number of nodes."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.token_s is None) == (self.seconds is None):
            raise ValueError("either `seconds`, or `token_s`")
        return self


class HardwareSettings(Section):
    """`[hardware.NAME]`: a kind of node other than the one on which the stages were measured."""

    cost: Positive = 1.0
    """The cost of a node, relative to that one."""
    generation: Positive = 1.0
    """The factor by which it samples faster."""
    training: Positive = 1.0
    """The factor by which it trains faster."""


class SiteSettings(Section):
    """`[sites.NAME]`: nodes of one kind in one place."""

    nodes: Nodes
    """The number of nodes."""
    hardware: str | None = None
    """The kind of its nodes, of `[hardware]`; the one on which the stages were measured if absent."""


class MemorySettings(Section):
    """`[memory]`: what engine and trainer need of one GPU, in GiB, to know whether one node can do both."""

    gpu_gb: Positive
    """The memory of one GPU."""
    engine_gb: Positive
    """While it samples."""
    engine_asleep_gb: NotNegative = sharing.IDLE_GB
    """The part that it keeps while it sleeps; with `[engine] sleep = "pause"` all of it."""
    trainer_gb: Positive
    """A rank's memory while it computes: `trainer plan-memory` predicts it."""
    trainer_idle_gb: NotNegative = sharing.IDLE_GB
    """The part that a rank keeps while its weights are offloaded."""

    @property
    def fit(self) -> sharing.Fit:
        """How engine and trainer fit on a GPU."""
        engine = sharing.Need(self.engine_gb, self.engine_asleep_gb)
        return sharing.fit(self.gpu_gb, engine, sharing.Need(self.trainer_gb, self.trainer_idle_gb))


class Profile(Section):
    """The whole file. One site shares its nodes between the stages; of two, each does one, and both ways are tried."""

    batch: WorkSettings | None = None
    generation: GenerationSettings
    sizes: dict[str, GenerationSettings] = Field({})
    """Engines of other sizes (GPUs of each), which are tried in place of `[generation]`."""
    training: TrainingSettings
    memory: MemorySettings | None = None
    hardware: dict[str, HardwareSettings] = Field({})
    sites: Annotated[dict[str, SiteSettings], Field(min_length=1, max_length=2)]

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        measured = [stage.seconds for stage in (self.generation, *self.sizes.values())]
        if self.batch is None and None in (*measured, self.training.seconds):
            raise ValueError("`[batch]` is needed, unless both stages have `seconds`")
        for name, site in self.sites.items():
            if site.hardware is not None and site.hardware not in self.hardware:
                raise ValueError(f"sites.{name}.hardware: there is no [hardware.{site.hardware}]")
        return self

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read a file. Raise BadProfile."""
        try:
            return cls.parse(read_toml(path), str(path))
        except Unreadable as error:
            raise BadProfile(str(error)) from error

    @classmethod
    def parse(cls, values: dict[str, Any], source: str = "profile") -> Profile:
        """Check values as they come from TOML. Raise BadProfile, which names every wrong key."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise BadProfile("\n  ".join([f"{source}:", *complaints(error, cls)])) from error

    def sites_to_try(self) -> dict[str, Site]:
        """Return the sites to try, by their names in a plan: each way to use them, with engines of each size."""
        training = self._training()
        found = self._ways(self._generation("generation", self.generation), training)
        for size, given in self.sizes.items():
            tried = self._ways(self._generation(f"sizes.{size}", given), training)
            found |= {f"{name}, engines {size}": site for name, site in tried.items()}
        return found

    def _ways(self, generation: Stage, training: Stage) -> dict[str, Site]:
        """Return the ways to use the sites, by their names."""
        pools = {name: self._pool(site) for name, site in self.sites.items()}
        if len(pools) == 1:
            ((name, pool),) = pools.items()
            return {name: Site(generation, training, pool)}
        (first, one), (second, other) = pools.items()
        return {
            f"rollout in {first}, training in {second}": Site(generation, training, one, other),
            f"rollout in {second}, training in {first}": Site(generation, training, other, one),
        }

    def _pool(self, site: SiteSettings) -> Pool:
        kind = self.hardware[site.hardware] if site.hardware else HardwareSettings()
        return Pool(site.nodes, Hardware(kind.cost, kind.generation, kind.training))

    def _generation(self, table: str, given: GenerationSettings) -> Stage:
        batch = self.batch
        if given.seconds is not None:
            return Points(tuple(sorted(given.seconds.items())))
        assert batch is not None
        try:
            engine = EngineModel(*(getattr(given, name) for name in COEFFICIENTS))
        except ValueError as error:
            raise BadProfile(f"{table}: {error}") from error
        return Sampling(
            engine,
            samples=batch.samples,
            reply=batch.reply_tokens,
            longest=batch.longest_tokens,
            prompt=batch.prompt_tokens,
            engines=given.engines,
            most=given.max_running,
            batches=batch.eta + 1,
        )

    def _training(self) -> Stage:
        given, batch = self.training, self.batch
        if given.seconds is not None:
            return Points(tuple(sorted(given.seconds.items())), trains=True)
        assert batch is not None and given.token_s is not None
        return Training(batch.samples, batch.reply_tokens, batch.prompt_tokens, given.token_s, given.fixed_s)
