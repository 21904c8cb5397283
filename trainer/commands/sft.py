"""`trainer sft`: supervised fine-tuning with the trainer of `trainer run`; the result is a Hugging Face directory.

Checkpoints survive a crash. A step's examples are a function of its number, so a new start continues after the newest checkpoint.
"""

from __future__ import annotations

import time
from pathlib import Path

from trainer.commands import export
from trainer.config.settings import SupervisedSettings
from trainer.data import supervised
from trainer.data.supervised import Examples
from trainer.errors import ConfigError, NotFinite
from trainer.loop.checkpoints import Cadence
from trainer.rank_rpc import serve_commands, shutdown_ranks
from trainer.rank_trainer import MAX_SKIPPED_STEPS, RankTrainer
from trainer.report import trackers
from trainer.report.metrics import Metrics
from trainer.report.tracking import Trackers
from trainer.state.directory import sweep

_KEPT = ("loss", "entropy", "grad_norm", "lr", "trained_tokens", "computed_tokens", "skipped_steps")
"""The trainer's figures that are meaningful here."""


def sft(settings: SupervisedSettings, out: Path | None = None) -> None:
    """Fine-tune for all epochs, or `[run] steps`, and write the model to `out`, or to `model` under `[run] dir`.

    Every rank of the run calls it. Raise ConfigError or NotFinite. Blocks.
    """
    trackers.check(settings.report.trackers)
    out = out or settings.run.dir / "model"
    if out.exists():
        raise ConfigError(f"{out} exists; name another --out, or remove it")
    examples = supervised.read(settings.sft, settings.model.path, settings.run.seed)
    steps = min(settings.run.steps, examples.steps)
    # The schedule of the learning rate ends with the last step.
    run = settings.run.model_copy(update={"steps": steps})
    trainer = RankTrainer.open(settings.model_copy(update={"run": run}), older=True)
    if not trainer.ranks.is_rank_zero:
        serve_commands(trainer)
        trainer.ranks.close()
        return
    sweep(trainer.checkpoints)
    with Metrics(settings.run.dir, steps, trackers=Trackers(settings)) as metrics:
        metrics.notify(described(examples))
        if trainer.damaged:
            metrics.notify(f"{trainer.damage}; renamed, and the steps since the one before are trained again")
            trainer.rename_damaged()
        _Run(settings, trainer, examples, metrics, steps).train()
    export.write(trainer, out)
    shutdown_ranks(trainer)
    metrics.notify(f"{out}: a model for transformers and engines")


def described(examples: Examples) -> str:
    """Return a sentence about the data."""
    left_out = f", {examples.left_out} left out as too long" if examples.left_out else ""
    return (
        f"{len(examples.learned)} examples to learn, {len(examples.held_out)} held out{left_out};"
        f" {examples.steps} steps in {examples.epochs} epochs"
    )


class _Run:
    """The steps."""

    def __init__(
        self,
        settings: SupervisedSettings,
        trainer: RankTrainer,
        examples: Examples,
        metrics: Metrics,
        steps: int,
    ) -> None:
        self._trainer = trainer
        self._examples = examples
        self._metrics = metrics
        self._steps = steps
        self._cadence = Cadence(trainer, settings.checkpoint.every)

    def train(self) -> None:
        """Train all remaining steps. Raise NotFinite."""
        trainer = self._trainer
        if trainer.steps == 0 and self._examples.held_out:
            self._metrics.fine_tuned(0, {"epoch": 0.0, **self._held_out()})
        while trainer.steps < self._steps:
            started = time.monotonic()
            measured = trainer.train(self._examples.of_step(trainer.steps))
            seconds = time.monotonic() - started
            figures = {name: measured[name] for name in _KEPT if name in measured}
            figures["epoch"] = trainer.steps / self._examples.steps_per_epoch
            figures["tokens_per_second"] = measured["trained_tokens"] / seconds
            if self._is_held_out_due():
                figures |= self._held_out()
            self._save()
            self._metrics.fine_tuned(trainer.steps, figures)
            if trainer.skipped >= MAX_SKIPPED_STEPS:
                raise NotFinite(
                    f"{trainer.skipped} steps in a row had a loss or gradient that is not finite; lower [optimizer] lr"
                )

    def _save(self) -> None:
        """Begin a checkpoint if one is due, and write one at the end."""
        if self._trainer.steps == self._steps:
            self._trainer.save_checkpoint()
        elif self._cadence.is_due():
            self._cadence.started()
            self._trainer.begin_checkpoint()
        self._trainer.prune_checkpoints()

    def _is_held_out_due(self) -> bool:
        steps = self._trainer.steps
        ends_epoch = steps % self._examples.steps_per_epoch == 0
        return bool(self._examples.held_out) and (ends_epoch or steps == self._steps)

    def _held_out(self) -> dict[str, float]:
        mean, tokens = self._trainer.likelihood(self._examples.held_out)
        return {"held_out_loss": -mean, "held_out_tokens": tokens}
