"""The learning itself: model, optimizer and algorithm of one rank, at one version.

Owns the weights that are being trained. Every method blocks and is called by one thread at a time; nothing here knows the
gateway. A batch is begun (`begin`), its groups are taken as they come, each micro-batch adding its gradient at once, and `step`
divides the whole by the normaliser, which is not known before. Of several ranks (`orders`), all hold the same batch and cut it
alike, and each computes every n-th micro-batch; a gradient is the sum over the ranks.
Invariants: the version grows by one with each step, also one that is skipped, and otherwise only by `renumber`; `parent` is the
version whose weights this one was made of; gradients are zero between batches, and outside of one; the gradient of a batch
depends, to the bit, on the sequence of its groups and not on the portions in which they came.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gateway.types import Episode, Group, Probe
from trainer.algorithms import Algorithm, TokenBatch, create
from trainer.data.batch import Batch, Counts, Minibatch
from trainer.data.details import DetailChoice
from trainer.data.images import ImageSupport
from trainer.data.packing import MicroBatch, Packer, even, lay_out
from trainer.data.tree import Credit, row_of_tokens, rows_of
from trainer.errors import CheckpointDamaged, ConfigError
from trainer.model import build, device, optim, parallel, precision, pretrained, probe
from trainer.model.offload import Offload, Where
from trainer.model.parallel import Ranks
from trainer.model.policy import Policy
from trainer.model.shards import HostCopy
from trainer.model.vision import VisionInputs
from trainer.orders import together
from trainer.settings import LearnerSettings
from trainer.state import checkpoint
from trainer.state.background import Background
from trainer.state.images import ImageFiles
from trainer.state.origin import Origin

_GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_NO_GPU = ("", "-1", "void", "none")
_MANY_WEIGHTS = 200_000_000
"""A step of so many takes minutes on a CPU."""


class Learner:
    """Model, optimizer and algorithm; `Learner.open` starts from the initial weights or the newest checkpoint."""

    def __init__(self, settings: LearnerSettings, ranks: Ranks) -> None:
        self.settings = settings
        self.ranks = ranks
        self.ordered = False
        self.speaking = threading.Lock()
        self.device = ranks.device
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
        """The newest checkpoint that is whole; None before the first."""
        self.damaged: list[Path] = []
        """Newer checkpoints that are damaged, the newest first."""
        self.damage = ""
        """What is wrong with the newest of these, in a sentence."""
        self._background = Background()
        self._host_copy = HostCopy()
        self._offload: Offload | None = None
        self.offloaded = False
        """True while weights, gradients and moments are not in the device's memory."""
        self.images = ImageFiles(settings.run.dir / "images", settings.run.image_cache_bytes)
        self.vision_inputs = VisionInputs.of(settings.model.path, self.images.read)
        """None if the model is given no images."""
        if self.vision_inputs is not None and settings.serves_adapters:
            raise ConfigError(
                "[weights] transport = 'lora': adapters beside a vision model are not published alone; any other"
                " transport publishes their sum with the weights"
            )
        self._policy = build.trained(settings.model, ranks, settings.run.seed, self.vision_inputs)
        self.algorithm: Algorithm = create(settings.algorithm)
        self.optimizer = optim.create(self._policy.model, settings.optimizer)
        self._round: list[MicroBatch] = []
        """Micro-batches that wait until there is one for each share of the ranks."""
        self._reference: build.Reference | None = None
        if self.algorithm.needs_reference or self.algorithm.reward_kl:
            self._reference = build.reference(settings.model, ranks, self.policy)
        self._origin = Origin.of(settings.model.path) if ranks.leads else None

    @property
    def policy(self) -> Policy:
        """The weights that are trained, which are at hand unless they are offloaded."""
        if self.offloaded:
            raise RuntimeError("the weights are offloaded: nothing can be computed before `onload`")
        return self._policy

    @property
    def model(self) -> Any:
        """The Hugging Face model that is trained."""
        return self.policy.model

    @classmethod
    def open(cls, settings: LearnerSettings, *, older: bool = False) -> Learner:
        """Return the learner at the newest checkpoint under `[run] dir`, or at version 0. Collective.

        `older`: where the newest is damaged, at the newest that is whole; `damaged` then says which are not. Raise
        CheckpointError.
        """
        prepare_torch(settings)
        ranks = parallel.join(settings.parallel, device_of(settings))
        with ranks.within("start"):
            learner = cls(settings, ranks)
            learner._restore_newest(older)
        return learner

    def _restore_newest(self, older: bool) -> None:
        """Restore as the first rank would have it."""
        mine = (checkpoint.newest_first(self.checkpoints), older) if self.ranks.leads else None
        found, older = self.ranks.from_first(mine)
        for directory in found:
            try:
                return self._restore(directory)
            except CheckpointDamaged as error:
                self.damage = self.damage or str(error)
                self.damaged.append(directory)
                if not older:
                    break
        if not found:
            return
        way = "put its files back, or begin a new run in another [run] dir"
        if len(self.damaged) < len(found):
            way = "put its files back, or go on from the one before it with `trainer run --from-older`"
        elif len(found) > 1:
            way = f"none of the {len(found) - 1} older ones is whole either: {way}"
        raise CheckpointDamaged(f"{self.damage}; {way}")

    @property
    def checkpoints(self) -> Path:
        """The folder of this run's checkpoints."""
        return self.settings.run.dir / "checkpoints"

    @together
    def restore(self, directory: Path) -> None:
        """Takes over model, optimizer, random numbers, version, lineage and probe of a checkpoint."""
        self._restore(directory)

    def _restore(self, directory: Path) -> None:
        said = checkpoint.load(directory, self.model, self.optimizer, self.ranks, self._terms)
        self.version, self.parent, self.steps, self.probe = said.version, said.parent, said.steps, said.probe
        self.groups, self.saved = said.groups, said

    @together
    def renumber(self, version: int) -> None:
        """The same weights under a new number, as a child of what they were: the numbers between are of a line that ends."""
        self.version, self.parent = version, self.version
        if self.probe is not None:
            self.probe = replace(self.probe, parent_logprobs=self.probe.new_logprobs)

    @property
    def _terms(self) -> checkpoint.Terms:
        """What checkpoints have to agree with."""
        wanted, model, rests = self.settings.model, self._policy.model, ""
        if self._policy.adapters is not None:
            rests = "what [model.lora] adds"
        elif any(not weight.requires_grad for weight in model.parameters()):
            rests = "what is not trained"
        elif self._reference is not None:
            rests = "the reference of the KL term"
        return checkpoint.Terms(wanted.dtype, wanted.adapters, self._origin, rests)

    @together
    def save_checkpoint(self) -> Path:
        """Write the state as a checkpoint, atomically. Raise CheckpointError."""
        self.checkpoint_written()
        began, said = time.monotonic(), self._described()
        tensors = checkpoint.tensors_of(self.model, self.optimizer, self.ranks)
        path = checkpoint.save(self.checkpoints, said, tensors, self.ranks)
        self._background.save_s = time.monotonic() - began
        self.saved = said
        return path

    @together
    def begin_checkpoint(self) -> None:
        """Copy the state, and write the copy as a checkpoint while what follows goes on; waits for the one before.

        Raise CheckpointError.
        """
        self.checkpoint_written()
        began, said = time.monotonic(), self._described()
        tensors = self._host_copy.take(checkpoint.tensors_of(self.model, self.optimizer, self.ranks))

        def write() -> checkpoint.CheckpointMeta:
            checkpoint.save(self.checkpoints, said, tensors, self.ranks.aside)
            return said

        self._background.begin(write, began)

    @property
    def saving(self) -> bool:
        """True while a checkpoint that was begun is being written."""
        return self._background.busy

    @property
    def save_s(self) -> float | None:
        """The seconds that the newest checkpoint of this process took, copy included; None before it is whole."""
        return self._background.save_s

    def checkpoint_written(self) -> None:
        """Wait until the checkpoint that was begun is whole on this rank. Raise CheckpointError or RankLost."""
        said = self._background.written()
        if said is not None and (self.saved is None or said.version > self.saved.version):
            self.saved = said

    def set_damaged_aside(self) -> None:
        """Rename the checkpoints that are newer than this one and damaged, as the first rank. Raise CheckpointError."""
        for directory in self.damaged:
            checkpoint.set_aside(directory)
        self.damaged, self.damage = [], ""

    @together
    def offload(self, where: Where, directory: Path) -> None:
        """Frees the device of all weights, gradients and moments, in the middle of a batch too. Raises OffloadFailed.

        `directory`: where `disk` puts them.
        """
        assert not self.offloaded
        if self._offload is None:
            self._offload = Offload(where, self.ranks, directory)
        parallel.reshard(self.policy)
        self._offload.out(self._tensors())
        self.offloaded = True

    @together
    def onload(self) -> None:
        """Brings everything back that `offload` took away, to the bit. Raises OffloadFailed."""
        assert self._offload is not None
        self._offload.back()
        self.offloaded = False

    def _tensors(self) -> Iterator[Tensor]:
        """All that takes memory between two passes, but for the tokens of a batch."""
        for module in (self._policy, self._reference):
            if isinstance(module, Policy):
                for weight in module.parameters():
                    yield from (weight, *(() if weight.grad is None else (weight.grad,)))
                yield from module.buffers()
        for entry in self.optimizer.moments().values():
            yield from entry.values()

    def _described(self) -> checkpoint.CheckpointMeta:
        """Return the checkpoint of the state as it is now, without its tensors."""
        wanted, groups = self.settings.model, self.groups
        lineage = self.version, self.parent, self.steps, self.probe
        return checkpoint.CheckpointMeta(*lineage, groups, wanted.dtype, wanted.adapters, self._origin)

    def prune_checkpoints(self) -> None:
        """Remove those beyond `[checkpoint] keep`. Only once the newest is of a version that engines run."""
        checkpoint.prune(self.checkpoints, self.settings.checkpoint.keep)

    @together
    def published(self) -> dict[str, Tensor]:
        """Return the whole weights as engines are given them, by name, on the CPU; empty on all ranks but the first.

        In `[model] dtype`, but for what stays in float32 (`precision`).
        """
        state, wanted = self.policy.published(), self.settings.model
        dtype = pretrained.DTYPES[wanted.dtype]
        return parallel.gather(
            state, self.ranks, dtype, precision.kept(self.model, wanted.path, dtype, state)
        )

    @together
    def published_adapter(self) -> dict[str, Tensor]:
        """The adapters that `[model.lora]` trained, by peft's names, on the CPU; empty on all ranks but the first."""
        assert self.policy.adapters is not None
        return parallel.gather(
            self.policy.adapters.factors(), self.ranks, pretrained.DTYPES[self.settings.model.dtype]
        )

    @together
    def begin(self, details: DetailChoice | None = None) -> Batch:
        """The batch on which this version is trained, empty yet; what was accumulated of another is forgotten.

        `details`: the parts to keep for reports.
        """
        self.discard()
        settings = self.settings
        return Batch(
            self.version,
            self.algorithm,
            settings.batch.tokens,
            self._reference_kl,
            share=self._policy.shares,
            credit=settings.credit,
            details=details,
            image_support=self._image_support,
        )

    @property
    def _image_support(self) -> ImageSupport | None:
        return None if self.vision_inputs is None else self.vision_inputs.image_support

    @together
    def miss(self, batch: Batch, images: Set[str]) -> None:
        """No token of an episode with one of these images is trained; to be said before the first such group is taken."""
        batch.miss(images)

    @together
    def take(self, batch: Batch, groups: Sequence[Group]) -> None:
        """Forward and backward over what is full with `groups`: adds to the gradient of the loss's *sum*. Raises FeedBroken."""
        for micro in batch.take(groups):
            self._round.append(micro)
            if len(self._round) == self.ranks.shares:
                own = even(self._round)[self.ranks.share]
                self._round.clear()
                self._accumulate(batch, own)

    def discard(self) -> None:
        """Forgets the gradient, and what waits for its round; the other ranks do so when the next batch begins."""
        self._round.clear()
        self.optimizer.zero_grad()

    def _accumulate(self, batch: Batch, micro: MicroBatch, proximal: Tensor | None = None) -> None:
        """Adds a micro-batch to the gradient and to the batch's sums."""
        micro = micro.to(self.device, self.policy.dtype)
        # Every rank passes through the reference, whose weights are shared as well.
        reference = self._reference_logprobs(micro)
        with self.policy.at_work(micro):
            logprobs, entropy = self.policy(micro, entropy_grad=self.algorithm.needs_entropy)
            if not micro.episodes[0]:
                # A pass for the other ranks' sake: through every weight that theirs use, with a gradient of 0.
                (0.0 * logprobs.sum()).backward()
                return
            loss = self.algorithm.loss(
                TokenBatch(
                    logprobs=logprobs,
                    entropy=entropy,
                    recorded=micro.recorded,
                    advantages=micro.advantages,
                    weights=micro.weights,
                    sequences=micro.sequences,
                    episodes=len(micro.episodes),
                    reference=reference,
                    proximal=proximal,
                )
            )
            loss.total.backward()
        batch.count(micro, logprobs.detach(), entropy.detach(), loss)

    def _reference_logprobs(self, micro: MicroBatch) -> Tensor | None:
        if not self.algorithm.needs_reference or self._reference is None:
            return None
        return self._reference.logprobs(micro)

    def _reference_kl(self, episode: Episode, image_support: ImageSupport | None) -> Credit:
        """The k1 estimate by node: recorded - reference log-probability, summed over the node's trained tokens."""
        assert self._reference is not None
        packer = Packer(self.settings.batch.tokens, share=self._reference.shares)
        # Stands in place of advantages, so that each token tells its node.
        own = {node.index: float(node.index) for node in episode.nodes}
        sums = dict.fromkeys(own, 0.0)
        rows = rows_of([(episode, own)], image_support=image_support).rows
        for micro in itertools.chain(packer.add(rows), packer.flush()):
            gaps = (micro.recorded - self._reference.logprobs(micro).cpu()).double()
            for node in micro.advantages.unique().long().tolist():
                sums[node] += float(gaps[micro.advantages == node].sum())
        return sums

    @together
    def step(self, batch: Batch) -> dict[str, float]:
        """The last micro-batches, the normaliser, the clip, and the optimizer steps that make version + 1; answers metrics.

        A loss or gradient that is not finite is discarded, with the minibatches after it: without any step before, version + 1
        has the weights of this one.
        """
        lr = self._set_lr()
        candidates = batch.candidates()
        merged = not self.settings.serves_adapters
        score = partial(probe.logprobs, self.policy, candidates, merged=merged)
        before = score()
        stepped, norm = self._optimize(batch)
        if stepped:
            self.skipped = 0
            self.version, self.parent = self.version + 1, self.version
            chosen = probe.choose(candidates, score(), before)
            noise = probe.noise(self.policy, chosen, merged=merged)
            self.probe = None if chosen is None else replace(chosen, noise=noise)
        else:
            self.skipped += 1
            self.renumber(self.version + 1)
        self.optimizer.zero_grad()
        self.steps += 1
        self.groups = tuple(sorted(batch.group_ids))
        return batch.measured() | {
            "grad_norm": norm,
            "lr": lr,
            "step": float(self.steps),
            "skipped_steps": float(self.skipped),
            **self._merged_share(),
            **device.peaks(self.device),
        }

    def _merged_share(self) -> dict[str, float]:
        """Return the share of the adapters' change that survives in merged weights, if those are published. Collective."""
        if self._policy.adapters is None or self.settings.serves_adapters:
            return {}
        from trainer.model import lora  # there already, with the adapters

        assert isinstance(self._policy.adapters, lora.Adapters)
        return {"merged_share": self._policy.adapters.merged_share()}

    def _optimize(self, batch: Batch) -> tuple[int, float]:
        """One optimizer step for each minibatch, until one is not finite; answers their number and the last one's norm."""
        minibatches, norm = batch.minibatches(), 0.0
        shares = [self._share(minibatch) for minibatch in minibatches]
        proximal = [self._proximal(share) for share in shares]
        for done, minibatch in enumerate(minibatches):
            for micro, old in zip(shares[done], proximal[done], strict=True):
                self._accumulate(batch, micro, old)
            batch.settle(self._counts_of_all)
            norm = parallel.divide_and_clip(
                self.model, minibatch.normaliser, self.settings.optimizer.grad_clip
            )
            if not (math.isfinite(norm) and math.isfinite(batch.loss)):
                return done, norm
            self.optimizer.step()
            self.optimizer.zero_grad()
        return len(minibatches), norm

    @together
    def rehearse(self, batch: Batch) -> tuple[float, float]:
        """The passes of a batch's first minibatch, and an optimizer step with a learning rate of 0, which leaves the weights as
        they are; answers the gradient's norm, and the seconds of the optimizer."""
        minibatch = batch.minibatches()[0]
        micros = self._share(minibatch)
        for micro, old in zip(micros, self._proximal(micros), strict=True):
            self._accumulate(batch, micro, old)
        norm = parallel.divide_and_clip(self.model, minibatch.normaliser, self.settings.optimizer.grad_clip)
        began = time.perf_counter()
        if math.isfinite(norm):
            optim.set_lr(self.optimizer, 0.0)
            self.optimizer.step()
            device.finish(self.device)
        self.discard()
        return norm, time.perf_counter() - began

    def _share(self, minibatch: Minibatch) -> list[MicroBatch]:
        """This rank's micro-batches of those that are left: as many as every other rank has, the last maybe an empty one."""
        left, self._round = [*self._round, *minibatch.micros], []
        shares, nothing = self.ranks.shares, lay_out([row_of_tokens((0, 0))], share=self.policy.shares)
        left += [nothing] * (-len(left) % shares)
        rounds = (even(left[i : i + shares]) for i in range(0, len(left), shares))
        return [micros[self.ranks.share] for micros in rounds]

    def _counts_of_all(self, own: Counts) -> list[Counts]:
        """The counts of all ranks, each micro-batch once."""
        return self.ranks.of_all(own if self.ranks.counts else Counts())

    def _proximal(self, micros: Sequence[MicroBatch]) -> list[Tensor | None]:
        """Each micro-batch's log-probabilities under the weights at the beginning of the batch; None where there is one step."""
        if self.algorithm.minibatches == 1:
            return [None] * len(micros)
        return [self.policy.logprobs(micro) for micro in micros]

    def _set_lr(self) -> float:
        """Sets the learning rate of the next step and returns it."""
        lr = optim.lr_at(self.steps, self.settings.optimizer, self.settings.run.steps)
        optim.set_lr(self.optimizer, lr)
        return lr

    @together
    def likelihood(self, groups: Sequence[Group]) -> tuple[float, int]:
        """The mean log-probability of the groups' trained tokens, in nats, without gradient, and their number."""
        packer, found = Packer(self.settings.batch.tokens, share=self.policy.shares), [0.0, 0.0]
        rows = (
            rows_of([(episode, {}) for episode in group.episodes], image_support=self._image_support).rows
            for group in groups
        )
        micros = [micro for some in rows for micro in packer.add(some)]
        self._round.clear()
        for micro in self._share(Minibatch([*micros, *packer.flush()], 1.0)):
            logprobs = self.policy.logprobs(micro)
            if micro.episodes[0]:
                found[0] += float(logprobs.double().sum())
                found[1] += len(logprobs)
        counted = self.ranks.of_all(found if self.ranks.counts else [0.0, 0.0])
        total, tokens = (sum(some) for some in zip(*counted, strict=True))
        return total / max(1.0, tokens), int(tokens)

    @together
    def train(self, groups: Sequence[Group], missing: Set[str] = frozenset()) -> dict[str, float]:
        """One whole batch that is here already. `missing`: hashes of its images that cannot be had."""
        batch = self.begin()
        self.miss(batch, missing)
        self.take(batch, groups)
        return self.step(batch)


def device_of(settings: LearnerSettings) -> str:
    """`[run] device`, with `auto` resolved."""
    if settings.run.device != "auto":
        return settings.run.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def cpu_warning(settings: LearnerSettings, weights: int, environment: Mapping[str, str] = os.environ) -> str:
    """A warning where `device = "auto"` is the CPU although a GPU was asked for, or a model has many weights; else empty."""
    if settings.run.device != "auto" or device_of(settings) != "cpu":
        return ""
    shown = next((name for name in _GPU_VARIABLES if environment.get(name, "") not in _NO_GPU), None)
    if shown is None and weights < _MANY_WEIGHTS:
        return ""
    why = (
        f"{shown} = {environment[shown]!r} asks for a GPU"
        if shown
        else f"the model has {weights / 1e6:,.0f} million weights"
    )
    return (
        f"warning: PyTorch finds no GPU, so this run computes on the CPU, and {why}. Is the driver there, and is torch the"
        ' build for CUDA? [run] device = "cuda" refuses to start without one, "cpu" says that this is meant'
    )


def prepare_torch(settings: LearnerSettings) -> None:
    """Threads, seed and determinism of this process."""
    if settings.run.threads is not None:
        torch.set_num_threads(settings.run.threads)
    torch.manual_seed(settings.run.seed)
    torch.use_deterministic_algorithms(settings.run.deterministic)
