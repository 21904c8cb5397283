"""The trainer's configuration: one TOML file, every key typed and bounded, unknown keys refused.

Relative paths are taken from the folder in which the trainer is started, as the gateway does, so that the two files agree on
what a path means. `HEADGATE_ADMIN_KEY` in the environment stands in for `[gateway] admin_key`, and `HEADGATE_TRAIN_NODES` (names
with commas between), which `scheduler run` sets, for `[gateway] nodes`.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    SerializeAsAny,
    ValidationError,
    model_validator,
)

from scheduler.configuration import complaints
from trainer.algorithms import REGISTRY, AlgorithmSettings
from trainer.errors import ConfigError

TRAIN_NODES = "HEADGATE_TRAIN_NODES"
Seconds = Annotated[float, Field(gt=0, le=7 * 86_400)]


class Section(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RunSettings(Section):
    """`[run]`: where the run lives and how long it goes on."""

    dir: Path
    """Checkpoints, weights, metrics and the logs of child processes."""
    steps: int = Field(ge=1, le=10_000_000)
    """Optimizer steps after which the run is over, counted from the initial checkpoint, resumed or not."""
    seed: int = Field(1, ge=0, lt=2**63)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = Field(None, ge=1, le=1024)
    """PyTorch's threads for one operation; its own choice if absent."""
    deterministic: bool = False
    """Refuse PyTorch operations whose result may differ from run to run."""
    batch_wait_s: Seconds = 3600.0
    """How long a leased buffer may take until no more groups of it are to come."""


class GatewaySettings(Section):
    """`[gateway]`: the gateway to train with: one that runs (`url`), or one to start (`config`)."""

    url: str | None = Field(None, pattern=r"^https?://")
    admin_key: SecretStr | None = None
    model: str | None = None
    """Which of the gateway's trained models this run trains; its first, if none is named."""
    config: Path | None = None
    """A gateway's TOML file; the trainer starts it as a child process and stops it at the end."""
    start_s: Seconds = 120.0
    """How long it may take to be ready, its engine included."""
    answer_s: Seconds = 300.0
    """How long the gateway may be away in the middle of a run."""
    nodes: tuple[str, ...] = ()
    """The nodes, by the gateway's names for them, on which this trainer computes: claimed before it does, released while it
    waits. Groups are then only gathered until the batch is whole, or the gateway has called the nodes back. It needs the
    gateway's root key. Without any, nothing is claimed."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.url is None) == (self.config is None):
            raise ValueError("exactly one of `url` and `config` is needed")
        return self

    @property
    def key(self) -> str | None:
        """The admin key in the clear."""
        return self.admin_key.get_secret_value() if self.admin_key else None


class ModelSettings(Section):
    """`[model]`: what is trained."""

    path: Path
    """A Hugging Face checkpoint: version 0, and the reference of a KL term."""
    dtype: Literal["float32", "bfloat16"] = "float32"


class OptimizerSettings(Section):
    """`[optimizer]`: AdamW, with a linear warm-up to a constant learning rate."""

    lr: float = Field(ge=0, le=1)
    """0 trains nothing and publishes the same weights again and again: a control run."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.999,
    )
    eps: float = Field(1e-8, gt=0, le=1)
    weight_decay: float = Field(0.0, ge=0, le=1)
    grad_clip: float = Field(1.0, gt=0)
    """The largest norm of the whole gradient; `inf` clips nothing."""
    warmup_steps: int = Field(0, ge=0)
    max_skipped_steps: int = Field(3, ge=1, le=10_000)
    """The run stops after so many steps in a row that were skipped. A step whose loss or gradient is not finite is skipped: its
    batch counts as trained, and its weights are those of the version before."""


class BatchSettings(Section):
    """`[batch]`: how a batch is cut for the device."""

    tokens: int = Field(8192, ge=16, le=2**24)
    """Tokens of a micro-batch, padding included. Training on a batch begins once its first groups fill one."""


class RolloutSettings(Section):
    """`[rollout]`: an agent to run while training; without the table, somebody else runs the episodes."""

    agent: str = Field(pattern=r"^[\w.]+:\w+$")
    """`module:function`, see `gateway.client`."""
    tasks: Path
    """JSON lines."""
    group_size: int = Field(8, ge=1, le=1024)
    spare: int = Field(0, ge=0, le=1024)
    """Further episodes of every group, which race: for the gateway's `[staleness] spare_members`."""
    concurrency: int = Field(64, ge=1, le=65_536)
    max_failures: float = Field(0.5, ge=0, le=1)
    """The run stops when a greater share of the last episodes failed; 1: it goes on whatever happens."""


class CheckpointSettings(Section):
    """`[checkpoint]`: how often one is written, and how many are kept."""

    every: int = Field(1, ge=1, le=10_000)
    """Steps from one checkpoint to the next. Above 1 a trainer that was killed trains the recorded batches since the last one
    again, and goes on if that gives the published weights to the bit, which needs `[run] deterministic`."""
    keep: int = Field(2, ge=1, le=10_000)


class WeightsSettings(Section):
    """`[weights]`: published versions."""

    keep: int = Field(3, ge=2, le=10_000)
    """Directories kept; the current version and its parent always are."""
    publish_s: Seconds = 600.0
    """How long the engines may take to run a published version."""


def _algorithm(value: Any) -> AlgorithmSettings:
    """A discriminated union on `type` over the registry."""
    if isinstance(value, AlgorithmSettings):
        return value
    if not isinstance(value, dict):
        raise ValueError("a table is needed")
    name = value.get("type", "grpo")
    if name not in REGISTRY:
        raise ValueError(f"type: {name!r} is none of {', '.join(sorted(REGISTRY))}")
    kind = REGISTRY[name][0]
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise ValueError("; ".join(complaints(error, kind))) from error


class Settings(Section):
    """The whole file."""

    run: RunSettings
    gateway: GatewaySettings
    model: ModelSettings
    optimizer: OptimizerSettings
    algorithm: Annotated[SerializeAsAny[AlgorithmSettings], BeforeValidator(_algorithm)] = Field(
        default_factory=lambda: _algorithm({})
    )
    batch: BatchSettings = BatchSettings()
    rollout: RolloutSettings | None = None
    checkpoint: CheckpointSettings = CheckpointSettings()
    weights: WeightsSettings = WeightsSettings()

    @classmethod
    def load(cls, path: Path) -> Settings:
        """Reads a TOML file. Raises ConfigError."""
        try:
            values = tomllib.loads(path.read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from error
        return cls.parse(values, str(path))

    @classmethod
    def parse(cls, values: dict[str, Any], source: str = "settings") -> Settings:
        """Checks values as they come from TOML. Raises ConfigError, which names every wrong key."""
        key, gateway = os.environ.get("HEADGATE_ADMIN_KEY"), values.get("gateway")
        if isinstance(gateway, dict):
            named = [name for name in os.environ.get(TRAIN_NODES, "").split(",") if name]
            given = {**({"admin_key": key} if key else {}), **({"nodes": named} if named else {})}
            values = {**values, "gateway": given | gateway}
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError("\n  ".join([f"{source}:", *complaints(error, cls)])) from error
