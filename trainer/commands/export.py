"""`trainer export`: the weights of a checkpoint as a Hugging Face directory, with the tokenizer's files of the initial one."""

from __future__ import annotations

from pathlib import Path

from headgate.weights import folders
from trainer.config.settings import Settings
from trainer.errors import CheckpointError, ConfigError
from trainer.model import pretrained
from trainer.rank_trainer import RankTrainer
from trainer.state import faults


def export(settings: Settings, out: Path, version: int | None = None, *, adapter: bool = False) -> int:
    """Write `out` atomically, in the precision in which versions are published; return the version.

    `version`: that checkpoint's; None: the newest. `adapter`: only the result of `[model.lora]`, in peft's form. Raise
    CheckpointError without a checkpoint, or if `out` cannot be written, and ConfigError if `out` exists or there are no adapters.
    """
    if out.exists():
        raise ConfigError(f"{out} exists; name another --out, or remove it")
    if adapter and settings.model.lora is None:
        raise ConfigError(
            "--adapter: the run has no [model.lora], all of its weights are trained; leave it out"
        )
    directory = settings.run.dir / "checkpoints"
    kept = list(folders.versions_in(directory))
    if not kept or (version is not None and version not in kept):
        which = f"checkpoint of version {version}" if kept else "checkpoint"
        existing = f"; existing: {', '.join(map(str, kept))}" if kept else ""
        raise CheckpointError(f"{directory} has no {which}{existing}")
    trainer = RankTrainer.open(settings, older=version is not None)
    if version is not None and version != trainer.version:
        trainer.restore(directory / folders.name_of(version))
    if adapter and trainer.policy.adapters is not None:
        with faults.writing(out), folders.AtomicDirectory(out) as temporary:
            trainer.policy.adapters.save(temporary, trainer.gather_adapter())
    else:
        write(trainer, out)
    return trainer.version


def write(trainer: RankTrainer, out: Path) -> None:
    """Write the trainer's weights as `out`, whole or not at all. Raise CheckpointError."""
    with faults.writing(out), folders.AtomicDirectory(out) as temporary:
        pretrained.save(trainer.model, temporary, trainer.settings.model.path, trainer.gather_weights())
