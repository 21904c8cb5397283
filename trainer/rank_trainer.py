"""The training of one rank: a batch's gradient, and the steps that make the next version.

A batch is begun (`begin_batch`); its groups are added as they arrive, and each full micro-batch adds its gradient immediately;
`step` divides the sum by the normalizer, which is not known earlier. Several ranks (`rank_rpc`) hold the same batch and divide it
in the same way; each computes every n-th micro-batch, and the gradient is summed over the ranks.
Invariants: the version grows by one with each step, also with one that is skipped; gradients are zero between batches; the
gradient of a batch depends, bit by bit, on the sequence of its groups and not on the portions in which they arrive.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from headgate.probes import choose, default_sequences
from headgate.types import Episode, Group
from trainer.algorithms import StepTokens, TokenBatch
from trainer.config.settings import TrainingSettings
from trainer.data.batch import Batch, Counts, Minibatch
from trainer.data.details import DetailChoice
from trainer.data.images import ImageSupport
from trainer.data.packing import MicroBatch, Packer, even, lay_out
from trainer.data.routes import RouteSupport
from trainer.data.tree import Credit, row_of_tokens, rows_of
from trainer.model import compiled, device, expert_parallel, optim, probe
from trainer.model.parallel import Ranks
from trainer.rank_rpc import on_all_ranks
from trainer.rank_state import RankState

MAX_SKIPPED_STEPS = 3
"""A run stops after this many steps in a row whose loss or gradient was not finite."""


class RankTrainer(RankState):
    """Computes gradients and makes steps; all methods with `@on_all_ranks` are collective."""

    def __init__(self, settings: TrainingSettings, ranks: Ranks) -> None:
        super().__init__(settings, ranks)
        self.skipped = 0
        """The newest steps in a row that were skipped, because their loss or gradient was not finite."""
        self._round: list[MicroBatch] = []
        """Micro-batches that wait until there is one for each data-parallel rank."""

    @on_all_ranks
    def begin_batch(self, details: DetailChoice | None = None) -> Batch:
        """Return an empty batch for this version; discard what was accumulated of another.

        `details`: the parts to keep for reports.
        """
        self.discard()
        settings = self.settings
        return Batch(
            self.version,
            self.algorithm,
            settings.batch.tokens,
            self._reference_kl,
            share_prefixes=self._policy.shares_prefixes,
            credit=settings.credit,
            details=details,
            image_support=self._image_support,
            route_support=self._route_support,
            distill=settings.distill,
            state=self.algorithm_state,
        )

    @property
    def _image_support(self) -> ImageSupport | None:
        return None if self.vision_inputs is None else self.vision_inputs.image_support

    @property
    def _route_support(self) -> RouteSupport | None:
        replay = self._policy.replay
        return None if replay is None else RouteSupport(replay.shape, self.settings.model.missing_routes)

    @on_all_ranks
    def exclude_images(self, batch: Batch, images: Set[str]) -> None:
        """Train no token of an episode with one of these images. Call it before the first such group is added."""
        batch.exclude_images(images)

    @on_all_ranks
    def add_groups(self, batch: Batch, groups: Sequence[Group]) -> None:
        """Compute forward and backward of each micro-batch that `groups` fill; add to the gradient of the *sum*.

        Raise FeedBroken.
        """
        for micro in batch.add_groups(groups):
            self._round.append(micro)
            if len(self._round) == self.ranks.data_parallel_size:
                own = even(self._round)[self.ranks.data_parallel_rank]
                self._round.clear()
                self._accumulate(batch, own)

    def discard(self) -> None:
        """Discard the gradient and waiting micro-batches; the other ranks do so when the next batch begins."""
        self._round.clear()
        self.optimizer.zero_grad()

    def _accumulate(
        self,
        batch: Batch,
        micro: MicroBatch,
        proximal: Tensor | None = None,
        statistics: Mapping[str, float] | None = None,
        *,
        counted: bool = True,
    ) -> None:
        """Add a micro-batch to the gradient and, if `counted`, to the batch's sums."""
        micro = micro.to(self.device, self.policy.dtype)
        # Every rank passes through the reference, whose weights are sharded as well.
        reference = None
        if self.algorithm.needs_reference and self._reference is not None:
            reference = self._reference.logprobs(micro)
        with self.policy.at_work(micro):
            logprobs, entropy = self.policy(micro, entropy_grad=self.algorithm.needs_entropy)
            if not micro.episodes[0]:
                # An empty pass for the other ranks: through every weight that theirs use, with a gradient of 0.
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
                    ids=micro.ids[micro.at],
                    staleness=batch.version - micro.versions,
                    statistics=statistics or {},
                )
            )
            loss.total.backward()
        if counted:
            batch.count(micro, logprobs.detach(), entropy.detach(), loss)

    def _reference_kl(self, episode: Episode, image_support: ImageSupport | None) -> Credit:
        """Return the k1 estimate by node: recorded - reference log-probability, summed over the node's trained tokens."""
        assert self._reference is not None
        packer = Packer(self.settings.batch.tokens, share_prefixes=self._reference.shares_prefixes)
        # The index of its node instead of an advantage, so that each token names its node.
        indexes = {node.index: float(node.index) for node in episode.nodes}
        sums = dict.fromkeys(indexes, 0.0)
        rows = rows_of(
            [(episode, indexes)], image_support=image_support, route_support=self._route_support
        ).rows
        for micro in itertools.chain(packer.add(rows), packer.flush()):
            gaps = (micro.recorded - self._reference.logprobs(micro).cpu()).double()
            for node in micro.advantages.unique().long().tolist():
                sums[node] += float(gaps[micro.advantages == node].sum())
        return sums

    @on_all_ranks
    def step(self, batch: Batch) -> dict[str, float]:
        """Compute the last micro-batches, normalize, clip, and make the optimizer steps of version + 1; return metrics.

        A loss or gradient that is not finite is discarded, with the minibatches after it. If that is the first optimizer step,
        version + 1 has the weights of this version.
        """
        lr = optim.lr_at(self.steps, self.settings.optimizer, self.settings.run.steps)
        optim.set_lr(self.optimizer, lr)
        minibatches = batch.minibatches()  # these have the rows of algorithms that need the whole batch
        candidates = batch.candidates() or default_sequences(self.policy.vocabulary)
        merged = not self.settings.serves_adapters
        score = partial(probe.logprobs, self.policy, candidates, merged=merged)
        before = score()
        stepped, norm = self._optimize(batch, minibatches)
        if stepped:
            self.skipped = 0
            self.version, self.parent = self.version + 1, self.version
            chosen = choose(candidates, score(), before)
            self.probe = replace(chosen, noise=probe.noise(self.policy, chosen, merged=merged))
        else:
            self.skipped += 1
            self.renumber(self.version + 1)
        self.optimizer.zero_grad()
        self.steps += 1
        self.groups = tuple(sorted(batch.group_ids))
        self.algorithm_state = batch.next_state()
        return batch.measured() | {
            "grad_norm": norm,
            "lr": lr,
            "step": float(self.steps),
            "skipped_steps": float(self.skipped),
            "compiled_graphs": float(compiled.graphs()),
            **self._merged_share(),
            **self._expert_loads(),
            **device.peaks(self.device),
        }

    def _merged_share(self) -> dict[str, float]:
        """Return the share of the adapters' change that survives in merged weights, if those are published. Collective."""
        if self._policy.adapters is None or self.settings.serves_adapters:
            return {}
        from trainer.model import lora  # already imported, with the adapters

        assert isinstance(self._policy.adapters, lora.Adapters)
        return {"merged_share": self._policy.adapters.merged_share()}

    def _expert_loads(self) -> dict[str, float]:
        """Return how evenly the step's tokens went through the experts, if ranks share them. Collective."""
        experts = self._policy.experts
        return (
            {}
            if experts is None
            else expert_parallel.balance_metrics(self.ranks.all_gather(experts.pop_counts()))
        )

    def _optimize(self, batch: Batch, minibatches: Sequence[Minibatch]) -> tuple[int, float]:
        """Make one optimizer step for each minibatch of each epoch, until one is not finite; return their number and the last
        norm."""
        norm = 0.0
        parts = [self._own_part(minibatch) for minibatch in minibatches]
        proximal = [self._proximal(part) for part in parts]
        order = [*range(len(minibatches))] * self.algorithm.epochs
        for steps, number in enumerate(order):
            statistics = self._statistics(batch, parts[number])
            for micro, old in zip(parts[number], proximal[number], strict=True):
                self._accumulate(batch, micro, old, statistics, counted=steps < len(minibatches))
            batch.settle(self._counts_of_all)
            norm = self._divide_and_clip(minibatches[number])
            if not (math.isfinite(norm) and math.isfinite(batch.loss)):
                return steps, norm
            self.optimizer.step()
            self.optimizer.zero_grad()
        return len(order), norm

    def _divide_and_clip(self, minibatch: Minibatch) -> float:
        return self.optimizer.divide_and_clip(minibatch.normalizer, self.settings.optimizer.grad_clip)

    @on_all_ranks
    def rehearse(self, batch: Batch) -> tuple[float, float]:
        """Compute a batch's first minibatch, and an optimizer step with a learning rate of 0, which changes no weight.

        Return the gradient's norm, and the seconds of the optimizer.
        """
        minibatch = batch.minibatches()[0]
        micros = self._own_part(minibatch)
        statistics = self._statistics(batch, micros)
        for micro, old in zip(micros, self._proximal(micros), strict=True):
            self._accumulate(batch, micro, old, statistics)
        norm = self._divide_and_clip(minibatch)
        began = time.perf_counter()
        if math.isfinite(norm):
            optim.set_lr(self.optimizer, 0.0)
            self.optimizer.step()
            device.finish(self.device)
        self.discard()
        return norm, time.perf_counter() - began

    def _own_part(self, minibatch: Minibatch) -> list[MicroBatch]:
        """Return this rank's part of the remaining micro-batches, of the same size on every rank; the last one may be empty."""
        left, self._round = [*self._round, *minibatch.micros], []
        size = self.ranks.data_parallel_size
        empty = lay_out([row_of_tokens((0, 0))], share_prefixes=self.policy.shares_prefixes)
        left += [empty] * (-len(left) % size)
        rounds = (even(left[i : i + size]) for i in range(0, len(left), size))
        return [micros[self.ranks.data_parallel_rank] for micros in rounds]

    def _counts_of_all(self, own: Counts) -> list[Counts]:
        """Return the counts of all ranks, each micro-batch once."""
        return self.ranks.all_gather(own if self.ranks.reports_metrics else Counts())

    def _proximal(self, micros: Sequence[MicroBatch]) -> list[Tensor | None]:
        """Return each micro-batch's log-probabilities under the batch's first weights; None if the loss does not use them."""
        if not self.algorithm.needs_proximal:
            return [None] * len(micros)
        return [self.policy.logprobs(micro) for micro in micros]

    def _statistics(self, batch: Batch, micros: Sequence[MicroBatch]) -> Mapping[str, float]:
        """Return the algorithm's figures of the optimizer step whose micro-batches these are; the same on every rank."""
        if not self.algorithm.needs_statistics:
            return {}
        own = torch.empty(4, 0, dtype=torch.float64)
        for micro in micros:
            logprobs = self.policy.logprobs(
                micro
            ).cpu()  # the other ranks' passes need that of an empty micro-batch, too
            parts = (logprobs, micro.recorded, micro.advantages, batch.version - micro.versions)
            if micro.episodes[0] and self.ranks.reports_metrics:
                own = torch.cat([own, torch.stack([part.double() for part in parts])], 1)
        logprobs, recorded, advantages, staleness = torch.cat(self.ranks.all_gather(own), 1)
        return self.algorithm.statistics(StepTokens(logprobs, recorded, advantages, staleness.long()))

    @on_all_ranks
    def likelihood(self, groups: Sequence[Group]) -> tuple[float, int]:
        """Return the mean log-probability of the groups' trained tokens, in nats, without gradient, and their number."""
        packer = Packer(self.settings.batch.tokens, share_prefixes=self.policy.shares_prefixes)
        rows = (
            rows_of(
                [(episode, {}) for episode in group.episodes],
                image_support=self._image_support,
                route_support=self._route_support,
            ).rows
            for group in groups
        )
        micros = [micro for some in rows for micro in packer.add(some)]
        self._round.clear()
        own = [0.0, 0.0]
        for micro in self._own_part(Minibatch([*micros, *packer.flush()], 1.0)):
            logprobs = self.policy.logprobs(micro)
            if micro.episodes[0]:
                own[0] += float(logprobs.double().sum())
                own[1] += len(logprobs)
        counted = self.ranks.all_gather(own if self.ranks.reports_metrics else [0.0, 0.0])
        total, tokens = (sum(some) for some in zip(*counted, strict=True))
        return total / max(1.0, tokens), int(tokens)

    @on_all_ranks
    def train(self, groups: Sequence[Group], missing: Set[str] = frozenset()) -> dict[str, float]:
        """Make the step of a complete batch. `missing`: hashes of its images that are unavailable."""
        batch = self.begin_batch()
        self.exclude_images(batch, missing)
        self.add_groups(batch, groups)
        return self.step(batch)
