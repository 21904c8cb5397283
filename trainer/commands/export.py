"""`trainer export`: the weights of a checkpoint as a Hugging Face directory, with the tokenizer's files of the initial one."""

from __future__ import annotations

from pathlib import Path

from gateway.weights import folders
from trainer.errors import CheckpointError, ConfigError
from trainer.learner import Learner
from trainer.model import pretrained
from trainer.settings import Settings
from trainer.state import faults
from trainer.state.directory import Aside


def export(settings: Settings, out: Path, version: int | None = None, *, adapter: bool = False) -> int:
    """Writes `out`, whole or not at all, in the precision in which versions are published; returns the version.

    `version`: that checkpoint's; None: the newest's. `adapter`: what `[model.lora]` trained alone, as peft reads it. Raises
    CheckpointError without a checkpoint, or if `out` cannot be written, and ConfigError if `out` exists, or there is no adapter.
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
        there = f"; there are: {', '.join(map(str, kept))}" if kept else ""
        raise CheckpointError(f"{directory}: there is no {which}{there}")
    learner = Learner.open(settings, older=version is not None)
    if version is not None and version != learner.version:
        learner.restore(directory / folders.name_of(version))
    if adapter and learner.policy.adapters is not None:
        with faults.writing(out), Aside(out) as aside:
            learner.policy.adapters.save(aside, learner.published_adapter())
    else:
        write(learner, out)
    return learner.version


def write(learner: Learner, out: Path) -> None:
    """Write the learner's weights as `out`, whole or not at all. Raise CheckpointError."""
    with faults.writing(out), Aside(out) as aside:
        pretrained.save(learner.model, aside, learner.settings.model.path, learner.published())
