"""`trainer sft`: supervised fine-tuning, by the learner that `trainer run` has, ended by a Hugging Face directory.

What survives a crash are the checkpoints: a step's examples are a function of its number, so a new start goes on behind the
newest one as if nothing had happened.
"""

from __future__ import annotations

import time
from pathlib import Path

from trainer.commands import export
from trainer.data import supervised
from trainer.data.supervised import Examples
from trainer.errors import ConfigError, NotFinite
from trainer.learner import Learner
from trainer.orders import dismiss, follow
from trainer.report import trackers
from trainer.report.metrics import Metrics
from trainer.report.senders import Senders
from trainer.settings import SupervisedSettings
from trainer.state import cadence
from trainer.state.directory import sweep

_KEPT = ("loss", "entropy", "grad_norm", "lr", "trained_tokens", "computed_tokens", "skipped_steps")
"""The learner's figures that mean something here."""


def sft(settings: SupervisedSettings, out: Path | None = None) -> None:
    """Fine-tunes until the epochs, or `[run] steps`, are over, and writes the model to `out`, or to `model` under `[run] dir`.

    Every rank of the run calls it. Raises ConfigError and NotFinite; blocks.
    """
    trackers.check(settings.report.to)
    out = out or settings.run.dir / "model"
    if out.exists():
        raise ConfigError(f"{out} exists; name another --out, or remove it")
    examples = supervised.read(settings.sft, settings.model.path, settings.run.seed)
    steps = min(settings.run.steps, examples.steps)
    # The schedule of the learning rate ends with the last step.
    run = settings.run.model_copy(update={"steps": steps})
    learner = Learner.open(settings.model_copy(update={"run": run}), older=True)
    if not learner.ranks.leads:
        follow(learner)
        learner.ranks.leave()
        return
    sweep(learner.checkpoints)
    with Metrics(settings.run.dir, steps, senders=Senders(settings)) as metrics:
        metrics.say(described(examples))
        if learner.damaged:
            metrics.say(f"{learner.damage}; renamed, and the steps since the one before are trained again")
            learner.set_damaged_aside()
        _Run(settings, learner, examples, metrics, steps).train()
    export.write(learner, out)
    dismiss(learner)
    metrics.say(f"{out}: a model as transformers and engines load it")


def described(examples: Examples) -> str:
    """The data in a sentence."""
    left_out = f", {examples.left_out} left out as too long" if examples.left_out else ""
    return (
        f"{len(examples.learnt)} examples to learn, {len(examples.held_out)} held out{left_out};"
        f" {examples.steps} steps in {examples.epochs} epochs"
    )


class _Run:
    """The steps."""

    def __init__(
        self, settings: SupervisedSettings, learner: Learner, examples: Examples, metrics: Metrics, steps: int
    ) -> None:
        self._settings = settings
        self._learner = learner
        self._examples = examples
        self._metrics = metrics
        self._steps = steps
        self._since = learner.steps, time.monotonic()
        """Steps and time at which the newest checkpoint was begun."""

    def train(self) -> None:
        """All steps that are left."""
        learner = self._learner
        if learner.steps == 0 and self._examples.held_out:
            self._metrics.fine_tuned(0, {"epoch": 0.0, **self._held_out()})
        while learner.steps < self._steps:
            started = time.monotonic()
            measured = learner.train(self._examples.of_step(learner.steps))
            seconds = time.monotonic() - started
            figures = {name: measured[name] for name in _KEPT if name in measured}
            figures["epoch"] = learner.steps / self._examples.steps_per_epoch
            figures["tokens_per_second"] = measured["trained_tokens"] / seconds
            if self._is_measured():
                figures |= self._held_out()
            self._save()
            self._metrics.fine_tuned(learner.steps, figures)
            self._check_skipped()

    def _save(self) -> None:
        """Begin a checkpoint if one is due, and write one at the end."""
        learner, (steps, began) = self._learner, self._since
        every, since_s = self._settings.checkpoint.every, time.monotonic() - began
        if learner.steps == self._steps:
            learner.save_checkpoint()
        elif every == "auto" and learner.saving:
            return
        elif cadence.is_due(every, learner.steps, learner.steps - steps, since_s, learner.save_s):
            self._since = learner.steps, time.monotonic()
            learner.begin_checkpoint()
        learner.prune_checkpoints()

    def _is_measured(self) -> bool:
        """True if the held-out loss is due."""
        every = self._settings.sft.held_out_every or self._examples.steps_per_epoch
        steps = self._learner.steps
        return bool(self._examples.held_out) and (steps % every == 0 or steps == self._steps)

    def _held_out(self) -> dict[str, float]:
        mean, tokens = self._learner.likelihood(self._examples.held_out)
        return {
            "held_out_loss": -mean,
            "held_out_tokens": tokens,
        }

    def _check_skipped(self) -> None:
        skipped, limit = self._learner.skipped, self._settings.optimizer.max_skipped_steps
        if skipped >= limit:
            raise NotFinite(
                f"{skipped} steps in a row had a loss or gradient that is not finite ([optimizer] max_skipped_steps = {limit});"
                " lower [optimizer] lr"
            )
