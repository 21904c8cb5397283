"""`trainer run --dry-run`: everything that a run loads, a pass and an optimizer step of 0, and what they take. Writes nothing."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import numpy as np
import torch
from transformers import AutoTokenizer

from headgate.client import GatewayClient, GatewayRefused
from headgate.types import (
    Episode,
    Group,
    Node,
)
from headgate.weights import folders
from trainer.commands.plan_memory import MemoryPlan, checkpoint_size, plan
from trainer.config.run import GatewaySettings
from trainer.config.settings import Settings
from trainer.errors import ConfigError, NotFinite
from trainer.memory_plan import checkpoint_bytes
from trainer.model.optim import muon_weights
from trainer.rank_rpc import shutdown_ranks
from trainer.rank_trainer import RankTrainer
from trainer.state.faults import GB, existing

_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Pass:
    """One micro-batch for each data-parallel rank, forward and backward."""

    version: int
    """The version of the weights: 0 for the initial ones, else the newest checkpoint's."""
    tokens: int
    seconds: float
    grad_norm: float
    optimizer_s: float
    """The seconds of the optimizer's step, once for each batch, however many micro-batches it has."""
    peak: int | None
    """The most bytes that the device's tensors took; None on the CPU, which does not count memory."""


@dataclass(frozen=True, slots=True)
class Space:
    """The disk that checkpoints take, in bytes."""

    checkpoint: int
    """One checkpoint."""
    needed: int
    """Bytes of future checkpoints: `[checkpoint] keep` of them and the one that is being written, without existing ones."""
    free: int

    @classmethod
    def of(cls, settings: Settings, size: int) -> Space:
        """Return what checkpoints of `size` bytes need where the `[run] dir` is, or will be."""
        directory = settings.run.dir / "checkpoints"
        most = settings.checkpoint.keep + 1
        needed = size * (most - min(most - 1, len(folders.versions_in(directory))))
        return cls(size, needed, shutil.disk_usage(existing(directory / "_")).free)

    @property
    def fits(self) -> bool:
        """Return whether there is enough."""
        return self.needed <= self.free

    def line(self) -> str:
        """Return the findings as a sentence."""
        remedy = (
            "" if self.fits else ": make room, lower [checkpoint] keep, or put [run] dir on a larger disk"
        )
        return (
            f"checkpoints: {self.checkpoint / GB:.3g} GB each; future ones need {self.needed / GB:.3g} GB of disk, and"
            f" {self.free / GB:.3g} GB are free{remedy}"
        )


@dataclass(frozen=True, slots=True)
class DryRun:
    """The findings of a dry run."""

    memory: MemoryPlan | None
    """None if the ranks share matrices, whose memory is not predicted."""
    vocabulary: int | None
    """The tokenizer's; None if only shapes were checked."""
    computed: Pass | None
    """None if only shapes were checked."""
    space: Space
    gateway: str

    @property
    def fits(self) -> bool | None:
        """False if the disk is too small; else None without a device's memory. Shapes do not depend on this machine."""
        if self.computed is not None and not self.space.fits:
            return False
        return None if self.memory is None else self.memory.fits

    def to_json(self) -> dict[str, Any]:
        """Return the findings; times in seconds, sizes in bytes."""
        return {
            "memory": self.memory and self.memory.to_json(),
            "tokenizer": self.vocabulary,
            "pass": self.computed and asdict(self.computed),
            "checkpoints": asdict(self.space) | {"fits": self.space.fits},
            "gateway": self.gateway,
        }

    def lines(self) -> Iterator[str]:
        """Yield the report for people, line by line."""
        if self.memory is None:
            yield "memory: not predicted for ranks that share matrices ([parallel] tensor)"
        else:
            yield from self.memory.lines()
        if self.computed is None:
            yield "only shapes: no weights were read, and nothing was computed"
        else:
            found = self.computed
            yield f"tokenizer: {self.vocabulary} tokens; attention and output head agree with the model's own"
            yield (
                f"forward and backward of version {found.version}: {found.seconds:.2f} s for {found.tokens} tokens"
                f" ({found.tokens / found.seconds:.0f}/s), gradient norm {found.grad_norm:.3g}"
            )
            yield (
                f"a step on a batch of n times these tokens: n x {found.seconds:.2f} s, and {found.optimizer_s:.2f} s for the"
                " optimizer"
            )
        yield self.space.line()
        yield f"gateway: {self.gateway}"


def rehearse(settings: Settings, *, meta: bool = False, memory: int | None = None) -> DryRun:
    """Rehearse a run as rank 0. `meta`, or a model without weights: check only its shapes.

    Raise TrainerError as a start would, and NotFinite for a gradient from which no step can be made.
    """
    shapes_only = meta or not any(settings.model.path.glob("*.safetensors"))
    if shapes_only:
        found = plan(settings, None, memory)
        space = Space.of(settings, checkpoint_size(settings))
        return DryRun(found, None, None, space, asyncio.run(_gateway(settings.gateway)))
    vocabulary = _tokenizer(settings)
    trainer = RankTrainer.open(settings)
    computed = _compute(trainer)
    planned = settings.parallel.tensor == 1 or memory is not None
    predicted = plan(settings, trainer.ranks.size, memory) if planned else None
    space = Space.of(settings, _checkpoint_size(trainer))
    shutdown_ranks(trainer)
    return DryRun(predicted, vocabulary, computed, space, asyncio.run(_gateway(settings.gateway)))


def _checkpoint_size(trainer: RankTrainer) -> int:
    trained = sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad)
    matrices = sum(weight.numel() for weight in muon_weights(trainer.model))
    return checkpoint_bytes(trained, matrices, trainer.settings)


def _tokenizer(settings: Settings) -> int:
    """Return the tokenizer's number of tokens. Raise ConfigError if it cannot be read, or has none."""
    path = settings.model.path
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        if not tokenizer("hello")["input_ids"]:
            # Without its files, transformers makes one that knows no text.
            raise ValueError("its files are missing")
    except (OSError, ValueError) as error:
        why = str(error).strip().splitlines()[0]
        raise ConfigError(f"[model] path = {str(path)!r}: its tokenizer cannot be read: {why}") from error
    return len(tokenizer)


def _compute(trainer: RankTrainer) -> Pass:
    """Return the second of two passes: the first one compiles kernels and allocates memory."""
    norm, seconds, optimizer_s, tokens = 0.0, 0.0, 0.0, 0
    for _ in range(2):
        groups = [_group(trainer, number) for number in range(trainer.ranks.data_parallel_size)]
        tokens = sum(len(node.ids) for each in groups for episode in each.episodes for node in episode.nodes)
        started = time.perf_counter()
        batch = trainer.begin_batch()
        trainer.add_groups(batch, groups)
        norm, optimizer_s = trainer.rehearse(batch)
        seconds = time.perf_counter() - started - optimizer_s
    if not np.isfinite(norm):
        raise NotFinite(f"the gradient's norm is {norm}, with random tokens")
    cuda = trainer.device.startswith("cuda")
    peak = torch.cuda.max_memory_allocated() if cuda else None
    return Pass(trainer.version, tokens, seconds, norm, optimizer_s, peak)


def _group(trainer: RankTrainer, number: int) -> Group:
    """Return a group that fills one micro-batch: episodes of random tokens, as long as the model accepts and at least two."""
    config, tokens = trainer.model.config.get_text_config(), trainer.settings.batch.tokens
    longest = min(getattr(config, "max_position_embeddings", tokens), tokens // 2)
    lengths = [longest] * (tokens // longest)
    random = np.random.default_rng(number)
    episodes = []
    for i, length in enumerate(lengths):
        ids = random.integers(0, config.vocab_size, length).astype(np.int32)
        if trainer.vision_inputs is not None:
            ids[ids == trainer.vision_inputs.image_support.placeholder] = 0
        nodes = (
            _node(0, ids[:1], trainer.version, sampled=False),
            _node(1, ids[1:], trainer.version, sampled=True),
        )
        components = dict.fromkeys(trainer.algorithm.needs_components, float(i % 2))
        episodes.append(Episode(f"rehearsal-{number}-{i}", float(i % 2), nodes, components=components))
    return Group(f"rehearsal-{number}", "rehearsal", trainer.version, tuple(episodes))


def _node(index: int, ids: Any, version: int, *, sampled: bool) -> Node:
    n = len(ids) if sampled else 0
    logprobs, versions = np.full(n, -1.0, np.float32), np.full(n, version, np.int32)
    return Node(index, index - 1, index, sampled, ids, logprobs, versions, np.zeros(n, np.uint8))


async def _gateway(settings: GatewaySettings) -> str:
    """Return whether the gateway responds, in words; a run would wait for it."""
    if settings.url is None:
        return f"{settings.config}: the run would start it"
    try:
        async with GatewayClient(settings.url, settings.key, _TIMEOUT_S) as client:
            await client.status(settings.model)
    except GatewayRefused as error:
        return f"{settings.url} refuses: {error}"
    except httpx.HTTPError:
        return f"{settings.url} does not respond"
    return f"{settings.url} responds"
