"""The learning itself: model, optimizer and algorithm of one process, at one version.

Owns the weights that are being trained. Every method blocks and is called by one thread at a time; nothing here knows the
gateway. A batch is begun (`begin`), its groups are taken as they come, each micro-batch adding its gradient at once, and `step`
divides the whole by the normaliser, which is not known before.
Invariants: the version grows by one with each step, also one that is skipped, and otherwise only by `renumber`; `parent` is the
version whose weights this one was made of; gradients are zero between batches, and outside of one; the gradient of a batch
depends, to the bit, on the sequence of its groups and not on the portions in which they came.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gateway.types import Episode, Group, Probe
from trainer.algorithms import Algorithm, TokenBatch, create
from trainer.data.batch import Batch
from trainer.data.packing import MicroBatch, Packer, rows_of
from trainer.model import head, probe
from trainer.model import pretrained as model
from trainer.sections.optimizer import OptimizerSettings
from trainer.settings import Settings
from trainer.state import checkpoint


class Learner:
    """Model, optimizer and algorithm; `Learner.open` starts anew or from the newest checkpoint."""

    def __init__(self, settings: Settings, device: str) -> None:
        self.settings = settings
        self.device = device
        self.version = 0
        self.parent: int | None = None
        self.steps = 0
        """Steps since the initial weights, skipped ones included."""
        self.skipped = 0
        """The newest steps in a row that were skipped, because their loss or gradient was not finite."""
        self.probe: Probe | None = None
        """Tells this version from its parent; None for version 0."""
        self.groups: tuple[str, ...] | None = ()
        """The sorted ids of the groups of the last step's batch; None if the checkpoint does not say."""
        self.saved: checkpoint.CheckpointMeta | None = None
        """The newest checkpoint; None before the first."""
        self.model: Any = model.load(settings.model.path, settings.model.dtype, device)
        self.algorithm: Algorithm = create(settings.algorithm)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **_adamw_options(settings.optimizer))
        self._reference: Any = None
        if self.algorithm.needs_reference or self.algorithm.reward_kl:
            self._reference = model.load(settings.model.path, settings.model.dtype, device)
            self._reference.requires_grad_(False)

    @classmethod
    def open(cls, settings: Settings) -> Learner:
        """The state of the newest checkpoint under `[run] dir`, or version 0. Raises CheckpointError."""
        prepare_torch(settings)
        learner = cls(settings, device_of(settings))
        if (found := checkpoint.newest(learner.checkpoints)) is not None:
            learner.restore(found)
        return learner

    @property
    def checkpoints(self) -> Path:
        """Where this run's checkpoints are."""
        return self.settings.run.dir / "checkpoints"

    def restore(self, directory: Path) -> None:
        """Takes over model, optimizer, random numbers, version, lineage and probe of a checkpoint."""
        said = checkpoint.load(directory, self.model, self.optimizer)
        # The optimizer's state has the options of the run that wrote it.
        for group in self.optimizer.param_groups:
            group.update(_adamw_options(self.settings.optimizer))
        self.version, self.parent, self.steps, self.probe = said.version, said.parent, said.steps, said.probe
        self.groups, self.saved = said.groups, said

    def renumber(self, version: int) -> None:
        """The same weights under a new number, as a child of what they were: the numbers between are of a line that ends."""
        self.version, self.parent = version, self.version
        if self.probe is not None:
            self.probe = replace(self.probe, parent_logprobs=self.probe.new_logprobs)

    def save_checkpoint(self) -> Path:
        """Writes the state as a checkpoint, atomically."""
        every = self.settings.checkpoint.every
        said = checkpoint.CheckpointMeta(
            self.version, self.parent, self.steps, self.probe, every, self.groups
        )
        path = checkpoint.save(self.checkpoints, said, self.model, self.optimizer)
        self.saved = said
        return path

    def prune_checkpoints(self) -> None:
        """Removes those beyond `[checkpoint] keep`. Only once the newest is of a version that engines run."""
        checkpoint.prune(self.checkpoints, self.settings.checkpoint.keep)

    def begin(self) -> Batch:
        """The batch on which this version is trained, empty yet; what was accumulated of another is forgotten."""
        self.discard()
        return Batch(self.version, self.algorithm, self.settings.batch.tokens, self._reference_kl)

    def take(self, batch: Batch, groups: Sequence[Group]) -> None:
        """Forward and backward over what is full with `groups`: adds to the gradient of the loss's *sum*. Raises FeedBroken."""
        self._accumulate(batch, batch.take(groups))

    def discard(self) -> None:
        """Forgets the gradient."""
        self.optimizer.zero_grad()

    def _accumulate(self, batch: Batch, micros: Iterable[MicroBatch]) -> None:
        for micro in micros:
            micro = micro.to(self.device, head.loss_dtype(self.model))
            batch.count(micro, *self._backward(micro))

    def _backward(self, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs, entropy = head.token_logprobs(
            self.model, micro.ids, micro.temperature, entropy_grad=self.algorithm.needs_entropy
        )
        loss = self.algorithm.loss(
            TokenBatch(
                logprobs=logprobs,
                entropy=entropy,
                recorded=micro.recorded,
                advantages=micro.advantages,
                weights=micro.weights,
                train=micro.train,
                reference=self._reference_logprobs(micro),
            )
        )
        loss.total.backward()
        return logprobs.detach(), {"loss": loss.total.detach(), **loss.sums}

    @torch.no_grad()
    def _reference_logprobs(self, micro: MicroBatch) -> Tensor | None:
        if not self.algorithm.needs_reference:
            return None
        return head.token_logprobs(self._reference, micro.ids, micro.temperature, with_entropy=False)[0]

    @torch.no_grad()
    def _reference_kl(self, episode: Episode) -> float:
        """The k1 estimate: recorded - reference log-probability, summed over the episode's trained tokens."""
        packer, total = Packer(self.settings.batch.tokens), 0.0
        rows = rows_of([(episode, 0.0)]).rows
        for micro in itertools.chain(packer.add(rows), packer.flush()):
            micro = micro.to(self.device, head.loss_dtype(self.model))
            reference = head.token_logprobs(
                self._reference, micro.ids, micro.temperature, with_entropy=False
            )[0]
            total += float((micro.recorded - reference)[micro.train].double().sum())
        return total

    def step(self, batch: Batch) -> dict[str, float]:
        """The last micro-batch, the normaliser, the clip, and the optimizer step that makes version + 1; answers metrics.

        A loss or gradient that is not finite is discarded: version + 1 then has the weights of this one.
        """
        self._accumulate(batch, batch.flush())
        measured = batch.measured()
        norm = self._finish_gradient(batch)
        lr = self._set_lr()
        if math.isfinite(norm) and math.isfinite(measured["loss"]):
            self.skipped = 0
            self._optimize(batch)
        else:
            self.skipped += 1
            self.renumber(self.version + 1)
        self.discard()
        self.steps += 1
        self.groups = tuple(sorted(batch.group_ids))
        return measured | {
            "grad_norm": norm,
            "lr": lr,
            "step": float(self.steps),
            "skipped_steps": float(self.skipped),
        }

    def _set_lr(self) -> float:
        """Sets the learning rate of the next step and returns it."""
        lr = self.settings.optimizer.lr
        if warmup := self.settings.optimizer.warmup_steps:
            lr *= min(1.0, (self.steps + 1) / warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _optimize(self, batch: Batch) -> None:
        """Changes the weights, which are the next version then, and chooses its probe."""
        candidates = batch.candidates()
        before = probe.logprobs(self.model, candidates, self.device)
        self.optimizer.step()
        self.version, self.parent = self.version + 1, self.version
        after = probe.logprobs(self.model, candidates, self.device)
        self.probe = probe.choose(candidates, after, before)

    def _finish_gradient(self, batch: Batch) -> float:
        """Turns the gradient of the sum into that of the mean, clipped; answers its norm before the clip."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        for parameter in parameters:
            parameter.grad /= batch.normaliser
        return float(torch.nn.utils.clip_grad_norm_(parameters, self.settings.optimizer.grad_clip))

    def train(self, groups: Sequence[Group]) -> dict[str, float]:
        """One whole batch that is here already."""
        batch = self.begin()
        self.take(batch, groups)
        return self.step(batch)


def _adamw_options(settings: OptimizerSettings) -> dict[str, Any]:
    return {
        "lr": settings.lr,
        "betas": settings.betas,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
    }


def device_of(settings: Settings) -> str:
    """`[run] device`, with `auto` resolved."""
    if settings.run.device != "auto":
        return settings.run.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def prepare_torch(settings: Settings) -> None:
    """Threads, seed and determinism of this process."""
    if settings.run.threads is not None:
        torch.set_num_threads(settings.run.threads)
    torch.manual_seed(settings.run.seed)
    torch.use_deterministic_algorithms(settings.run.deterministic)
