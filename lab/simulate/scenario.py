"""A scenario: SCENARIO.toml, typed and bounded. What a policy may not choose; the same for all of them.

gpus = 128                # all of them
gpu = "H800"              # a kind of coefficients.toml
model = "7B"              # likewise
engine_gpus = 1           # of one engine (tensor parallel)
engines_of = { 8 = 1 }    # of the GPUs that only sample, one engine of 8 in place of smaller ones; by number of GPUs
train_share = 0.5         # of the GPUs, where rollout and training are separate
batch = 64                # groups
group = 16                # episodes
eta = 1                   # the bound on staleness that every asynchronous policy gets
batches = 10              # of which the first `warmup` are not counted
warmup = 3
prompt = 500              # tokens
likeness = 0.5            # correlation of lengths within a group
recorded = "groups.jsonl" # in place of [lengths] and [turns]: see `recorded.py`

[lengths]                 # see workload.Lengths
[turns]                   # see workload.Turns
[engine_costs]            # measured, in place of gpu and model: prefill_s, capacity, slots, and model = { ... } with
                          # s_per_kv_token, s_per_batch, s_per_call and s_per_step
[trainer_costs]           # likewise: token_s, step_s, spread
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headgate.configuration import (
    Unreadable,
    complaints,
    read_toml,
)
from lab.simulate.engine import EngineCosts
from lab.simulate.errors import ScenarioError
from lab.simulate.hardware import (
    MeasuredTransfers,
    TrainerCosts,
    TransferCosts,
    engine_costs,
    measured_costs,
    trainer_costs,
    transfer_costs,
)
from lab.simulate.recorded import read
from lab.simulate.workload import Lengths, Recorded, Stated, Turns, Workload

_DRAWN = 64
"""Groups of the profile that `scheduler plan` would get."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LengthsTable(_Table):
    """The parameters of `workload.Lengths`."""

    kind: Literal["lognormal", "tail", "constant"] = "lognormal"
    median: float = Field(1000.0, ge=1, le=1e6)
    sigma: float = Field(0.9, ge=0, le=3)
    longest: int = Field(28000, ge=1, le=1_000_000)
    growth: float = Field(0.0, ge=-0.5, le=1.0)


class TurnsTable(_Table):
    """The parameters of `workload.Turns`."""

    mean: float = Field(1.0, ge=1, le=100)
    most: int = Field(1, ge=1, le=200)
    result: int = Field(200, ge=1, le=100_000)
    wait_s: float = Field(0.0, ge=0, le=3600)


class Scenario(_Table):
    """One scenario."""

    model_config = ConfigDict(extra="forbid", frozen=True, ignored_types=(cached_property,))

    name: str = ""
    gpus: int = Field(ge=2, le=20_000)
    gpu: str = "H800"
    model: str = "7B"
    engine_gpus: int = Field(1, ge=1, le=64)
    engines_of: dict[Annotated[int, Field(ge=1, le=64)], Annotated[int, Field(ge=1, le=20_000)]] = {}
    """The number of engines of other sizes than `engine_gpus`, by their GPUs."""
    slots: int = Field(0, ge=0, le=4096)
    """Calls that one engine runs concurrently; 0: as in coefficients.toml."""
    train_share: float = Field(0.5, gt=0, lt=1)
    batch: int = Field(ge=1, le=100_000)
    group: int = Field(16, ge=1, le=1024)
    eta: int = Field(1, ge=0, le=64)
    batches: int = Field(10, ge=1, le=1000)
    warmup: int = Field(3, ge=0)
    prompt: int = Field(500, ge=1, le=1_000_000)
    likeness: float = Field(0.5, ge=0, le=1)
    lengths: LengthsTable = LengthsTable()
    turns: TurnsTable = TurnsTable()
    recorded: Path | None = None
    engine_costs: EngineCosts | None = None
    """Engine costs in place of coefficients.toml."""
    trainer_costs: TrainerCosts | None = None
    """Trainer costs in place of coefficients.toml."""
    transfer_costs: MeasuredTransfers | None = None
    """The costs of loading a version into engines in place of coefficients.toml, as `bench.publish` measures headgate's code."""

    @classmethod
    def load(cls, path: Path, engine_gpus: int | None = None) -> Self:
        """Read a file. Raise ScenarioError that names it and the error. `engine_gpus` overrides the file's."""
        try:
            table = read_toml(path)
            if "recorded" in table:
                table["recorded"] = path.parent / table["recorded"]
            if engine_gpus is not None and "engine_costs" in table:
                raise ScenarioError(f"{path}: [engine_costs] does not cover engines of another size")
            size = {} if engine_gpus is None else {"engine_gpus": engine_gpus}
            return cls(**{"name": path.stem, **table, **size})
        except Unreadable as error:
            raise ScenarioError(str(error)) from error
        except TypeError as error:
            raise ScenarioError(f"{path}: {error}") from error
        except ValidationError as error:
            raise ScenarioError("\n  ".join([f"{path}:", *complaints(error, cls)])) from error

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.warmup >= self.batches:
            raise ValueError(f"warmup ({self.warmup}) must be less than batches ({self.batches})")
        if self.gpus % self.engine_gpus or self.gpus < 2 * self.engine_gpus:
            raise ValueError(
                f"gpus ({self.gpus}) must be a multiple of engine_gpus ({self.engine_gpus}), at least twice it"
            )
        if self.engines_of and self.engine_costs is not None:
            raise ValueError("engines_of: [engine_costs] does not cover engines of another size")
        longest = self.workload(0).longest
        for gpus in (self.engine_gpus, *self.engines_of):
            if longest > (capacity := self.engine_on(gpus).capacity):
                raise ValueError(
                    f"a context of {longest} tokens does not fit into an engine's cache of {capacity}"
                )
        return self

    @cached_property
    def engine(self) -> EngineCosts:
        """The costs of each engine of `engine_gpus`."""
        return self.engine_on(self.engine_gpus)

    def engine_on(self, gpus: int) -> EngineCosts:
        """Return the costs of an engine of `gpus` GPUs. Raise ScenarioError if the model does not fit."""
        return self.engine_costs or engine_costs(self.model, self.gpu, gpus, self.slots)

    def engines(self, sampling: int, lent: int) -> list[int]:
        """Return the GPUs of each engine, the largest first. Raise ScenarioError if they do not add up."""
        others = [gpus for gpus, count in sorted(self.engines_of.items(), reverse=True) for _ in range(count)]
        rest = sampling - sum(others)
        if rest < 0 or rest % self.engine_gpus:
            raise ScenarioError(
                f"engines_of has {sum(others)} GPUs: of the {sampling} that only sample, none or a multiple of engine_gpus"
                f" ({self.engine_gpus}) must be left"
            )
        return others + [self.engine_gpus] * ((rest + lent) // self.engine_gpus)

    @cached_property
    def trainer(self) -> TrainerCosts:
        """The costs of the trainer."""
        return self.trainer_costs or trainer_costs(self.model, self.gpu)

    def transfers(self, train_gpus: int) -> TransferCosts:
        """Return the costs of weight transfers from a trainer of `train_gpus` GPUs."""
        if self.transfer_costs is None:
            return transfer_costs(self.model, self.engine_gpus, train_gpus)
        engines = self.gpus // self.engine_gpus
        return measured_costs(self.transfer_costs, self.model, self.engine_gpus, engines, train_gpus)

    def workload(self, seed: int) -> Workload:
        """Return the groups of a seed."""
        if self.recorded is not None:
            return Recorded(read(self.recorded), seed)
        lengths, turns = Lengths(**self.lengths.model_dump()), Turns(**self.turns.model_dump())
        return Stated(seed, self.group, self.batch, lengths, turns, self.prompt, self.likeness)

    @cached_property
    def contexts_mean(self) -> float:
        """Mean tokens of an episode, of the same profile."""
        return float(np.mean(self._profile[1]))

    @cached_property
    def sampled_mean(self) -> float:
        """Mean tokens that are sampled in an episode, of the same profile."""
        return float(np.mean(self._profile[0]))

    @cached_property
    def _profile(self) -> tuple[np.ndarray, np.ndarray]:
        """Sampled tokens, and all tokens, of each episode of the first groups."""
        workload = self.workload(0)
        episodes = [turns for n in range(_DRAWN) for turns in workload.task(n).episodes]
        sampled = [sum(turn.sampled for turn in turns) for turns in episodes]
        context = [sum(turn.prompt + turn.sampled for turn in turns) for turns in episodes]
        return np.array(sampled), np.array(context)

    @cached_property
    def train_gpus(self) -> int:
        """The trainer's, where rollout and training are separate: whole engines' worth."""
        engines = round(self.gpus * self.train_share / self.engine_gpus)
        return min(max(engines, 1), self.gpus // self.engine_gpus - 1) * self.engine_gpus
