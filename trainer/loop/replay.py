"""Going on after a kill from a checkpoint that is older than the newest version: the batches since then are trained again.

Versions are published and batches acknowledged whose effect no checkpoint holds yet. The gateway
has the record of every batch, and training is a function of checkpoint and batches, so the same learner, given the same groups in
the same order, must come to the same weights. Whether it did is not believed but compared, bit for bit, with the weights that
were written last; one acknowledged batch may follow them, whose version nobody has seen. If it did not (another machine, an
operation that is not deterministic, a record that is gone), the caller begins a new line, as for any old checkpoint.

Invariant: nothing is published or acknowledged here, and a learner whose replay failed is put back to its checkpoint.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from gateway.client import GatewayRefused
from gateway.weights import folders
from gateway.weights.adapter import FACTORS
from trainer.errors import FeedBroken, LeaseLost
from trainer.learner import Learner
from trainer.loop.feed import Feed
from trainer.loop.images import EpisodeImages
from trainer.model import pretrained as model
from trainer.publish.filesystem import WeightsDirectory
from trainer.state import checkpoint


class Impossible(Exception):
    """Why the learner cannot be brought to the newest version."""


async def replay(
    learner: Learner,
    feed: Feed,
    images: EpisodeImages,
    weights: WeightsDirectory,
    published: int,
    used: int,
    consumed: int,
) -> None:
    """Brings `learner` from its checkpoint to version `used`, the newest that was written, and on to `consumed`, the one that the
    acknowledged batches make.

    `published` is the newest that the gateway knows. Raises Impossible with the reason, and leaves the learner as it was.
    """
    first, last = learner.version, max(used, consumed)
    try:
        await _check_line(learner, feed, weights, published, used)
        for buffer in range(first, last):
            groups = await feed.record(buffer)
            missing = await images.fetch(groups)
            await asyncio.to_thread(learner.train, groups, missing)
            if learner.version == used and not await asyncio.to_thread(
                _is_published, learner, weights.path(used)
            ):
                raise Impossible(_other_weights(learner.settings.run.deterministic))
    except (GatewayRefused, LeaseLost, FeedBroken, OSError) as error:
        await _put_back(learner, first)
        raise Impossible(f"the batches since then cannot be trained again: {error}") from error
    except Impossible:
        await _put_back(learner, first)
        raise


def outcome(first: int, used: int, consumed: int) -> str:
    """Says in a few words what a replay from version `first` has come to."""
    told = [f"give the weights of version {used} to the bit"] if used > first else []
    if consumed > used:
        told.append(f"make version {consumed}, which was not written")
    return " and ".join(told)


def left_out(version: int, consumed: int) -> str:
    """Says which acknowledged batches a line leaves out that goes on from a version; empty if none."""
    if consumed <= version:
        return ""
    batches = f"batch {version}" if consumed == version + 1 else f"batches {version} to {consumed - 1}"
    return f", without {batches}: acknowledged, and not trained again"


async def _check_line(
    learner: Learner, feed: Feed, weights: WeightsDirectory, published: int, used: int
) -> None:
    """Refuses what a kill between two checkpoints cannot have left behind: a checkpoint was removed, or the line was left."""
    saved = learner.saved
    if saved is None or checkpoint.was_removed(learner.checkpoints, saved.version):
        raise Impossible("a checkpoint after it is missing")
    for version in range(saved.version + 1, used + 1):
        if (why := weights.rejected(version)) is not None:
            raise Impossible(f"version {version} was rejected ({why})")
        parent = await feed.parent(version) if version <= published else weights.parent(version)
        if parent != version - 1:
            raise Impossible(f"version {version} was made of version {parent}")


def _is_published(learner: Learner, version: Path) -> bool:
    """True if a version has the learner's weights bit for bit."""
    if learner.settings.serves_adapters:
        return model.holds(version, learner.published_adapter(), FACTORS)
    return model.holds(version, model.as_stored(learner.model, learner.published()))


def _other_weights(deterministic: bool) -> str:
    said = "training the recorded batches again gave other weights than were published"
    if deterministic:
        return f"{said}, so the settings, the machine or PyTorch are not what they were"
    return f"{said} ([run] deterministic = true would avoid it)"


async def _put_back(learner: Learner, version: int) -> None:
    if learner.version != version:
        await asyncio.to_thread(learner.restore, learner.checkpoints / folders.name_of(version))
