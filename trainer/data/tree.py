"""From the token trees of episodes to rows, the paths on which a model is trained.

A row is a path from the root of an episode's tree towards a leaf (what one call saw, and what it sampled), up to the last token
that it trains. Paths share prefixes, so a token may stand in several rows. Invariants:
- no token of an episode is trained with whose images the model cannot be given what was sampled from (`trainer.data.images`);
- every sampled token is trained at most once over all rows: in the first row that holds it;
- a sampled token that is not trained is counted once, with its reason;
- a row ends with a token to train;
- logits can be divided by every temperature of a row, and that of a token to train is the recorded one.
Pure: no I/O, no model.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headgate import trees
from headgate.kept import Kept
from headgate.routes import Routes
from headgate.types import (
    LEAST_TEMPERATURE,
    Episode,
    Float32Array,
    ImageSpan,
    Int32Array,
    Node,
)
from trainer.config.distill import DistillSettings
from trainer.data.distill import advantages, gaps
from trainer.data.images import ImageSupport, refused
from trainer.data.routes import RouteSupport, unrouted
from trainer.errors import FeedBroken

BoolArray = npt.NDArray[np.bool_]
Float64Array = npt.NDArray[np.float64]
Credit = Mapping[int, float]
"""The advantage of an episode's tokens, by the index of their node."""


@dataclass(frozen=True, slots=True)
class Row:
    """One path of one episode; every array has shape (tokens,), and entry j belongs to token j."""

    episode_id: str
    ids: Int32Array
    train: BoolArray
    logprobs: Float32Array
    """Recorded, in nats; 0 where nothing was sampled."""
    versions: Int32Array
    """The version that sampled the token; -1 where nothing was sampled."""
    temperature: Float32Array
    """Finite and above 0; 1 where nothing was sampled, or nothing is trained of what was sampled at an impossible one."""
    advantages: Float64Array
    """0 where nothing is trained."""
    weight: float
    """The weight of each of its trained tokens in the loss's sum."""
    nodes: Int32Array
    """The node of the episode's tree that the token is of."""
    images: tuple[ImageSpan, ...] = ()
    """The images among its tokens, in order."""
    routes: Routes | None = None
    """Shape (tokens, layers, top_k), -1 where none were recorded; None: they are not replayed."""
    kept: Kept | None = None
    """Over what the distribution of each token is normalized, if it was truncated; None: none was."""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(slots=True)
class Rows:
    """The rows of a batch, and what was left out of them."""

    rows: list[Row] = field(default_factory=list)
    trained: int = 0
    masked: Counter[str] = field(default_factory=Counter)
    """Sampled tokens that are not trained, by reason."""
    unrouted: int = 0
    """Trained tokens whose experts the model chooses itself, because none were recorded."""
    teacher_gap: float = 0.0
    """The sum of teacher's - recorded log-probabilities over the trained tokens, nats."""


def rows_of(
    episodes: Iterable[tuple[Episode, Credit]],
    *,
    sequence_mean: bool = False,
    image_support: ImageSupport | None = None,
    route_support: RouteSupport | None = None,
    distill: DistillSettings | None = None,
) -> Rows:
    """Return the rows of episodes, each given with its advantages.

    `sequence_mean` makes every episode count the same (each of its n trained tokens weighs 1/n); otherwise every token does.
    `image_support`: of the trained model; None if it accepts no images. `route_support`: None if no routes are replayed.
    `distill`: what a teacher's scores count; None: nothing. Raise FeedBroken if a token to train was recorded at an impossible
    temperature, or with routes of another model.
    """
    result = Rows()
    for episode, credit in episodes:
        if (reason := refused(episode, image_support)) is not None:
            result.masked[reason] += sum(len(node.ids) for node in episode.nodes if node.sampled)
            continue
        trainable = {node.index: _trainable(node, result.masked) for node in episode.nodes}
        _check_temperatures(episode, trainable)
        routes = None if route_support is None else route_support.routes_of(episode)
        if routes is not None:
            result.unrouted += sum(
                int((trainable[node.index] & unrouted(node, routes)).sum()) for node in episode.nodes
            )
        trained = sum(int(mask.sum()) for mask in trainable.values())
        if trained == 0:
            continue
        result.trained += trained
        if distill is not None:
            result.teacher_gap += sum(
                float(np.nansum(gaps(node)[trainable[node.index]])) for node in episode.nodes if node.sampled
            )
        weight = 1.0 / trained if sequence_mean else 1.0
        earned = {
            node.index: advantages(node, credit.get(node.index, 0.0), distill) for node in episode.nodes
        }
        result.rows += _paths(episode, trainable, earned, weight, routes)
    return result


def _trainable(node: Node, masked: Counter[str]) -> BoolArray:
    """Return which tokens of a node may be trained, shape (n,), and count the others in `masked`."""
    train = np.full(len(node.ids), node.sampled, dtype=np.bool_)
    if node.sampled:
        for reason, tokens in trees.untrained(node):
            masked[reason] += int(tokens.sum())
            train &= ~tokens
    return train


def _check_temperatures(episode: Episode, trainable: Mapping[int, BoolArray]) -> None:
    """Raise FeedBroken if a token to train was recorded at a temperature by which logits cannot be divided."""
    for node in episode.nodes:
        if trainable[node.index].any() and not _divides(node.temperature):
            raise FeedBroken(
                f"episode {episode.episode_id}, node {node.index}: its tokens are to be trained and were recorded at temperature"
                f" {node.temperature:g}, at which no engine samples them ({LEAST_TEMPERATURE:g} is the least);"
                " start a run with a new store"
            )


def _divides(temperature: float) -> bool:
    """Return whether an engine may have sampled at a temperature above 0; it is float32, as in the feed."""
    return bool(np.float32(LEAST_TEMPERATURE) <= np.float32(temperature) < np.inf)


def _paths(
    episode: Episode,
    trainable: dict[int, BoolArray],
    earned: Mapping[int, Float64Array],
    weight: float,
    routes: Mapping[int, Routes] | None,
) -> Iterator[Row]:
    for path in trees.paths(episode.nodes):
        masks = []
        for piece in path:
            mask = trainable[piece.node.index][: piece.length].copy()
            mask[: piece.earlier] = False
            masks.append(mask)
        train = np.concatenate(masks)
        if train.any():
            yield _row(episode.episode_id, path, train, earned, weight, routes)


def _row(
    episode_id: str,
    path: trees.Path,
    train: BoolArray,
    earned: Mapping[int, Float64Array],
    weight: float,
    routes: Mapping[int, Routes] | None,
) -> Row:
    # What follows changes no log-probability before it.
    end = int(train.nonzero()[0][-1]) + 1

    pieces = [(piece.node, piece.length) for piece in path]
    starts = itertools.accumulate((n for _, n in pieces), initial=0)
    images = (
        image._replace(offset=start + image.offset)
        for (node, n), start in zip(pieces, starts, strict=False)
        for image in node.images
        if image.offset < n
    )

    def column(values: str, filler: float, dtype: type) -> npt.NDArray[np.generic]:
        return np.concatenate([
            getattr(node, values)[:n] if node.sampled else np.full(n, filler, dtype)
            for node, n in pieces
        ])[:end].astype(dtype)  # fmt: skip

    return Row(
        episode_id=episode_id,
        ids=np.concatenate([node.ids[:n] for node, n in pieces])[:end].astype(np.int32),
        train=train[:end],
        logprobs=column("logprobs", 0.0, np.float32),  # type: ignore[arg-type]
        versions=column("versions", -1, np.int32),  # type: ignore[arg-type]
        temperature=np.concatenate([
            np.full(n, node.temperature if node.sampled and _divides(node.temperature) else 1.0, np.float32)
            for node, n in pieces
        ])[:end],
        advantages=np.concatenate([earned[node.index][:n] for node, n in pieces])[:end] * train[:end],
        weight=weight,
        nodes=np.concatenate([np.full(n, node.index, np.int32) for node, n in pieces])[:end],
        images=tuple(image for image in images if image.offset < end),
        routes=None if routes is None else np.concatenate([routes[node.index][:n] for node, n in pieces])[:end],
        kept=_kept(pieces, end),
    )  # fmt: skip


def _kept(pieces: Sequence[tuple[Node, int]], end: int) -> Kept | None:
    """Return what the distributions of a path's first `end` tokens kept; `pieces`: its nodes and the length of each on it."""
    if all(node.kept is None for node, _ in pieces):
        return None
    found = Kept.joined(
        Kept.none(n) if node.kept is None else node.kept.at(np.arange(len(node.ids)) < n)
        for node, n in pieces
    )
    return found.at(np.arange(len(found.counts)) < end)


def row_of_tokens(ids: Sequence[int], *, episode_id: str = "") -> Row:
    """Return a row of plain tokens, of which all but the first are trained, at temperature 1 and weight 1."""
    n = len(ids)
    return Row(
        episode_id=episode_id,
        ids=np.array(ids, np.int32),
        train=np.arange(n) >= 1,
        logprobs=np.zeros(n, np.float32),
        versions=np.full(n, -1, np.int32),
        temperature=np.ones(n, np.float32),
        advantages=np.zeros(n),
        weight=1.0,
        nodes=np.zeros(n, np.int32),
    )
