"""The learning itself: model, optimizer and algorithm of one process, at one version.

Owns the weights that are being trained. Every method blocks and is called by one thread at a time; nothing here knows the
gateway. Invariants: the version grows by one with each optimizer step, and otherwise only by `renumber`; `parent` is the version
whose weights this one was made of; gradients are zero between batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gateway.types import Group, Probe
from trainer import checkpoint, model, packing, probe
from trainer.algorithms import Algorithm, TokenBatch, create
from trainer.packing import MicroBatch, Rows
from trainer.settings import Settings


@dataclass(frozen=True, slots=True)
class Batch:
    """A buffer's groups, ready to be trained."""

    groups: Sequence[Group]
    rows: Rows
    reward_mean: float
    reward_std: float
    """Over all episodes of the batch."""
    equal_reward_groups: float
    """The share of groups whose rewards are all equal, and which therefore teach nothing."""


class Learner:
    """Model, optimizer and algorithm; `Learner.open` starts anew or from the newest checkpoint."""

    def __init__(self, settings: Settings, device: str) -> None:
        self.settings = settings
        self.device = device
        self.version = 0
        self.parent: int | None = None
        self.steps = 0
        """Optimizer steps since the initial weights."""
        self.probe: Probe | None = None
        """Tells this version from its parent; None for version 0."""
        self.model: Any = model.load(settings.model.path, settings.model.dtype, device)
        self.algorithm: Algorithm = create(settings.algorithm)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.optimizer.lr,
            betas=settings.optimizer.betas,
            eps=settings.optimizer.eps,
            weight_decay=settings.optimizer.weight_decay,
        )
        self._reference: Any = None
        if self.algorithm.needs_reference:
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
        self.version, self.parent, self.steps, self.probe = said.version, said.parent, said.steps, said.probe

    def renumber(self, version: int) -> None:
        """The same weights under a new number, as a child of what they were: the numbers between are of a line that ends."""
        self.version, self.parent = version, self.version
        if self.probe is not None:
            self.probe = replace(self.probe, parent_logprobs=self.probe.new_logprobs)

    def save_checkpoint(self) -> Path:
        """Writes the state as a checkpoint, atomically, and removes those beyond `[checkpoint] keep`."""
        said = checkpoint.Said(self.version, self.parent, self.steps, self.probe)
        path = checkpoint.save(self.checkpoints, said, self.model, self.optimizer)
        checkpoint.prune(self.checkpoints, self.settings.checkpoint.keep)
        return path

    def assemble(self, groups: Sequence[Group]) -> Batch:
        """Advantages per group, then rows."""
        episodes, equal = [], 0
        for group in groups:
            rewards = torch.tensor([e.reward for e in group.episodes], dtype=torch.float64)
            advantages = self.algorithm.advantages(rewards)
            equal += int(not bool(advantages.any()))
            episodes += list(zip(group.episodes, advantages.tolist(), strict=True))
        scores = np.array([episode.reward for episode, _ in episodes] or [0.0])
        return Batch(
            groups=groups,
            rows=packing.rows_of(episodes, sequence_mean=self.algorithm.sequence_mean),
            reward_mean=float(scores.mean()),
            reward_std=float(scores.std()),
            equal_reward_groups=equal / max(1, len(groups)),
        )

    def accumulate(self, batch: Batch) -> dict[str, float]:
        """Forward and backward over all micro-batches: leaves the gradient of the loss's *sum*; answers metrics."""
        sums: dict[str, float] = defaultdict(float)
        gap_max, staleness_max = 0.0, 0
        for micro in packing.micro_batches(batch.rows.rows, self.settings.batch.tokens):
            micro = micro.to(self.device)
            logprobs, values = self._backward(micro)
            for name, value in values.items():
                sums[name] += float(value)
            gaps = (logprobs - micro.recorded).abs()[micro.train & (micro.versions == self.version)]
            staleness = (self.version - micro.versions)[micro.train]
            sums["same_version_tokens"] += gaps.numel()
            sums["gap"] += float(gaps.sum())
            sums["staleness"] += float(staleness.sum())
            gap_max = max(gap_max, float(gaps.max()) if gaps.numel() else 0.0)
            staleness_max = max(staleness_max, int(staleness.max()))
        return _means(sums, gap_max, batch, self._normaliser(batch)) | {
            "staleness_max": float(staleness_max),
        }

    def _backward(self, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs, entropy = model.token_logprobs(self.model, micro.ids, micro.temperature)
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
        if self._reference is None:
            return None
        return model.token_logprobs(self._reference, micro.ids, micro.temperature, with_entropy=False)[0]

    def _normaliser(self, batch: Batch) -> float:
        rows = batch.rows
        return float(max(1, rows.episodes if self.algorithm.sequence_mean else rows.trained))

    def step(self, batch: Batch) -> dict[str, float]:
        """Applies the normaliser, clips, and takes the optimizer step that makes version + 1."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        for parameter in parameters:
            parameter.grad /= self._normaliser(batch)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.settings.optimizer.grad_clip)
        lr = self.settings.optimizer.lr
        if warmup := self.settings.optimizer.warmup_steps:
            lr *= min(1.0, (self.steps + 1) / warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        candidates = probe.candidates(batch.rows.rows)
        before = probe.logprobs(self.model, candidates, self.device)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version, self.parent = self.version + 1, self.version
        self.steps += 1
        after = probe.logprobs(self.model, candidates, self.device)
        self.probe = probe.choose(candidates, after, before)
        return {"grad_norm": float(norm), "lr": lr, "step": float(self.steps)}


def _means(sums: dict[str, float], gap_max: float, batch: Batch, normaliser: float) -> dict[str, float]:
    trained = max(1, batch.rows.trained)
    same = sums.pop("same_version_tokens", 0.0)
    gap = sums.pop("gap", 0.0)
    # Without a token of this version there is no gap to speak of, and 0 would look like a perfect one.
    result = {"logprob_gap_mean": gap / same, "logprob_gap_max": gap_max} if same else {}
    result["loss"] = sums.pop("loss", 0.0) / normaliser
    result["staleness_mean"] = sums.pop("staleness", 0.0) / trained
    return result | {name: value / trained for name, value in sums.items()} | {
        "same_version_tokens": float(same),
        "trained_tokens": float(batch.rows.trained),
        **{f"masked_tokens/{reason}": float(n) for reason, n in batch.rows.masked.items()},
    }  # fmt: skip


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
