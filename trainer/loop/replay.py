"""Recovery from a checkpoint that is older than the newest version: the batches since then are trained again.

Versions are published and batches acknowledged before a checkpoint holds their effect. The gateway has the record of every batch,
and training is a function of checkpoint and batches, so the same groups in the same order must give the same weights. The result
is compared, bit by bit, with the weights that were written last; at most one acknowledged batch may follow them, whose version
was never written. If they differ (another machine, an operation that is not deterministic, a missing record), the caller begins a
new line, as for any old checkpoint.

Invariant: nothing is published or acknowledged here, and a trainer whose replay failed is restored to its checkpoint.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from headgate.client import GatewayRefused
from headgate.weights import folders
from headgate.weights.adapter import FACTORS
from trainer.errors import FeedBroken, LeaseLost
from trainer.loop.feed import Feed
from trainer.loop.images import EpisodeImages
from trainer.loop.teacher import Teacher, scored
from trainer.model import pretrained as model
from trainer.publish.filesystem import WeightsDirectory
from trainer.rank_trainer import RankTrainer
from trainer.state import checkpoint


class ReplayFailed(Exception):
    """The reason why the trainer cannot reproduce the newest version."""


async def replay(
    trainer: RankTrainer,
    feed: Feed,
    images: EpisodeImages,
    teacher: Teacher | None,
    weights: WeightsDirectory,
    published: int,
    used: int,
    consumed: int,
) -> None:
    """Train from the checkpoint to version `used`, the newest that was written, and on to `consumed`.

    `consumed` is the version that the acknowledged batches make, `published` the newest that the gateway knows. Raise
    ReplayFailed with the reason, and leave the trainer as it was.
    """
    first, last = trainer.version, max(used, consumed)
    try:
        await _check_line(trainer, feed, weights, published, used)
        for batch in range(first, last):
            groups = await scored(teacher, await feed.record(batch))
            missing = await images.fetch(groups)
            await asyncio.to_thread(trainer.train, groups, missing)
            if trainer.version == used and not await asyncio.to_thread(
                _is_published, trainer, weights.path(used)
            ):
                raise ReplayFailed(_differing_weights(trainer.settings.run.deterministic))
    except (GatewayRefused, LeaseLost, FeedBroken, OSError) as error:
        await _restore(trainer, first)
        raise ReplayFailed(f"the batches since then cannot be trained again: {error}") from error
    except ReplayFailed:
        await _restore(trainer, first)
        raise


def outcome(first: int, used: int, consumed: int) -> str:
    """Return the result of a replay from version `first` in a few words."""
    results = [f"give the weights of version {used} bit by bit"] if used > first else []
    if consumed > used:
        results.append(f"make version {consumed}, which was not written")
    return " and ".join(results)


def left_out(version: int, consumed: int) -> str:
    """Return which acknowledged batches a new line from `version` leaves out, in words; empty if none."""
    if consumed <= version:
        return ""
    batches = f"batch {version}" if consumed == version + 1 else f"batches {version} to {consumed - 1}"
    return f", without {batches}: acknowledged, and not trained again"


async def _check_line(
    trainer: RankTrainer, feed: Feed, weights: WeightsDirectory, published: int, used: int
) -> None:
    """Raise ReplayFailed if more happened than a kill between two checkpoints: a removed checkpoint, or another line."""
    saved = trainer.saved
    if saved is None or checkpoint.was_removed(trainer.checkpoints, saved.version):
        raise ReplayFailed("a checkpoint after it is missing")
    for version in range(saved.version + 1, used + 1):
        if (why := weights.rejected(version)) is not None:
            raise ReplayFailed(f"version {version} was rejected ({why})")
        parent = await feed.parent(version) if version <= published else weights.parent(version)
        if parent != version - 1:
            raise ReplayFailed(f"version {version} was made from version {parent}")


def _is_published(trainer: RankTrainer, version: Path) -> bool:
    """Return true if a written version has the trainer's weights bit by bit."""
    if trainer.settings.serves_adapters:
        return model.holds(version, trainer.gather_adapter(), FACTORS)
    return model.holds(version, model.as_stored(trainer.model, trainer.gather_weights()))


def _differing_weights(deterministic: bool) -> str:
    message = "training the recorded batches again gave other weights than were published"
    if deterministic:
        return f"{message}, so the settings, the machine or PyTorch have changed"
    return f"{message} ([run] deterministic = true would avoid it)"


async def _restore(trainer: RankTrainer, version: int) -> None:
    if trainer.version != version:
        await asyncio.to_thread(trainer.restore, trainer.checkpoints / folders.name_of(version))
