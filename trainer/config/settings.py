"""The trainer's configuration: one TOML file, every key typed and bounded, unknown keys refused.

The file may hold the gateway's tables too (`headgate/configuration.py`): then the trainer starts the gateway with the same file,
unless `[gateway]` names another one, or a URL.

Relative paths are taken from the folder in which the trainer is started, as the gateway does, so that the two files agree on
what a path means. `HEADGATE_ADMIN_KEY` in the environment stands in for `[gateway] admin_key`, `HEADGATE_TEACHER_KEY` for
`[distill] key`, and `HEADGATE_TRAIN_NODES` (names with commas between), which `scheduler run` sets, for `[gateway] nodes`.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    BeforeValidator,
    Field,
    SerializeAsAny,
    ValidationError,
    model_validator,
)

from headgate.configuration import (
    TABLES,
    Section,
    Unreadable,
    complaints,
    is_shared,
    own_tables,
    read_toml,
)
from trainer.algorithms import AlgorithmSettings, settings_of
from trainer.algorithms.sft import LikelihoodSettings
from trainer.config.batch import BatchSettings, CreditSettings
from trainer.config.distill import DistillSettings
from trainer.config.eval import EvalSettings
from trainer.config.model import ModelSettings
from trainer.config.optimizer import OptimizerSettings
from trainer.config.parallel import ParallelSettings
from trainer.config.report import ReportSettings
from trainer.config.run import (
    GatewaySettings,
    RolloutSettings,
    RunSettings,
)
from trainer.config.sft import SftRunSettings, SftSettings
from trainer.config.state import CheckpointSettings, PublishSettings
from trainer.errors import ConfigError

TRAIN_NODES = "HEADGATE_TRAIN_NODES"


def _algorithm(value: Any) -> AlgorithmSettings:
    """Return the settings of the class that `type` names."""
    if isinstance(value, AlgorithmSettings):
        return value
    if not isinstance(value, dict):
        raise ValueError("a table is needed")
    try:
        kind = settings_of(str(value.get("type", "grpo")))
    except ValueError as error:
        raise ValueError(f"type: {error}") from error
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise ValueError("; ".join(complaints(error, kind))) from error


def _set(values: dict[str, Any], change: str) -> None:
    """Put `table.key=value` into a file's values; a value that is not TOML is a string. Raise ConfigError."""
    name, equals, text = change.partition("=")
    *tables, key = (part.strip() for part in name.split("."))
    if not equals or not tables or not all((*tables, key)):
        raise ConfigError(f"--set {change}: table.key=value is needed, such as optimizer.lr=1e-6")
    table = values
    for part in tables:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {change}: {part} is not a table")
    try:
        table[key] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        table[key] = text.strip()


def _no_algorithm(value: Any) -> AlgorithmSettings:
    if not isinstance(value, LikelihoodSettings):
        raise ValueError("supervised fine-tuning has no algorithm to choose: leave the table out")
    return value


class TrainingSettings(Section):
    """The tables of every trainer."""

    run: RunSettings
    model: ModelSettings
    optimizer: OptimizerSettings
    algorithm: Annotated[SerializeAsAny[AlgorithmSettings], BeforeValidator(_algorithm)] = Field(
        default_factory=lambda: _algorithm({})
    )
    batch: BatchSettings = BatchSettings()
    parallel: ParallelSettings = ParallelSettings()
    credit: CreditSettings = CreditSettings()
    distill: DistillSettings | None = None
    checkpoint: CheckpointSettings = CheckpointSettings()
    report: ReportSettings = ReportSettings()

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.model.lora is not None and self.optimizer.type == "muon":
            raise ValueError(
                'optimizer.type = "muon" makes whole matrices orthogonal, and not the factors of [model.lora]; use "adamw"'
            )
        if self.model.lora is not None and self.parallel.tensor > 1:
            raise ValueError(
                "[model.lora] cannot be trained with [parallel] tensor: adapters are not divided; use `shard`"
            )
        self._check_components()
        return self

    def _check_components(self) -> None:
        """Raise ValueError for tables that change rewards, if the algorithm learns from their components alone."""
        algorithm, credit = self.algorithm.create(), self.credit
        if not algorithm.needs_components:
            return
        changed = {
            f'[credit] level = "{credit.level}"': credit.level != "episode",
            '[credit] truncated = "penalize"': credit.truncated == "penalize",
            "[credit] overlong_buffer": credit.overlong_buffer > 0,
            'algorithm.kl = "k1"': algorithm.reward_kl > 0,
        }
        for name, used in changed.items():
            if used:
                raise ValueError(
                    f"{name} changes the reward, and algorithm.type = {self.algorithm.type!r} learns from its components alone"
                )

    @property
    def serves_adapters(self) -> bool:
        """True if engines receive only the adapters, in addition to the frozen weights."""
        return False

    @classmethod
    def load(cls, path: Path, changes: Sequence[str] = ()) -> Self:
        """Read a TOML file; `changes` are `table.key=value` and override it. Raise ConfigError."""
        try:
            read = read_toml(path)
        except Unreadable as error:
            raise ConfigError(str(error)) from error
        values = own_tables(read, "trainer")
        for change in changes:
            if is_shared(read) and change.partition(".")[0].strip() in TABLES["gateway"]:
                raise ConfigError(f"--set {change}: the gateway reads this table: change it in {path}")
            _set(values, change)
        gateway = values.setdefault("gateway", {}) if is_shared(read) else None
        if isinstance(gateway, dict) and not {"url", "config"} & gateway.keys():
            gateway["config"] = path
        return cls.parse(values, " ".join([str(path), *(f"--set {change}" for change in changes)]))

    @classmethod
    def parse(cls, values: dict[str, Any], source: str = "settings") -> Self:
        """Check values as they come from TOML. Raise ConfigError, which names every wrong key."""
        key, gateway = os.environ.get("HEADGATE_ADMIN_KEY"), values.get("gateway")
        if isinstance(gateway, dict):
            named = [name for name in os.environ.get(TRAIN_NODES, "").split(",") if name]
            given = {**({"admin_key": key} if key else {}), **({"nodes": named} if named else {})}
            values = {**values, "gateway": given | gateway}
        teacher, teacher_key = values.get("distill"), os.environ.get("HEADGATE_TEACHER_KEY")
        if isinstance(teacher, dict) and teacher_key:
            values = {**values, "distill": {"key": teacher_key} | teacher}
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError("\n  ".join([f"{source}:", *complaints(error, cls)])) from error


class Settings(TrainingSettings):
    """The whole file of `trainer run`."""

    gateway: GatewaySettings
    rollout: RolloutSettings | None = None
    eval: EvalSettings = EvalSettings()
    publish: PublishSettings = PublishSettings()

    @property
    def serves_adapters(self) -> bool:
        return self.publish.transport == "lora"

    @model_validator(mode="after")
    def _has_adapters_to_publish(self) -> Self:
        if self.serves_adapters and self.model.lora is None:
            raise ValueError("[publish] transport = 'lora' publishes adapters: set [model.lora]")
        return self

    @model_validator(mode="after")
    def _can_evaluate(self) -> Self:
        if self.eval.every is not None and not (self.eval.agent or self.rollout):
            raise ValueError("[eval] every needs an agent: [rollout] agent or command, or [eval] agent")
        env = self.rollout is not None and self.rollout.env is not None and self.eval.agent is None
        if self.eval.every is not None and not self.eval.tasks and not env:
            raise ValueError("[eval] every needs `tasks`")
        return self


class SupervisedSettings(TrainingSettings):
    """The whole file of `trainer sft`."""

    run: SftRunSettings
    sft: SftSettings
    algorithm: Annotated[SerializeAsAny[AlgorithmSettings], BeforeValidator(_no_algorithm)] = Field(
        default_factory=lambda: LikelihoodSettings()
    )
