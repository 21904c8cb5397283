"""Which episodes with images a model can be trained on, and why others cannot. Pure: no I/O, no model."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, replace

import numpy as np

from headgate.types import (
    Episode,
    Group,
    Node,
)

MISSING = "image_missing"
"""The reason why no token of an episode is trained of which an image is unavailable, or cannot be read as it was recorded."""
PLACEHOLDER = "image_placeholder"
"""The reason why no token of an episode is trained whose placeholders are not those of its images, for example a sampled one."""
UNSEEN = "images_unseen"
"""The reason why no token of an episode with images is trained by a model that accepts none."""


@dataclass(frozen=True, slots=True)
class ImageSupport:
    """The images that a model is given."""

    placeholder: int
    """The token that stands for an image, as often as it has merged patches."""
    missing: Set[str] = frozenset()
    """The hashes of unavailable images."""

    def without(self, missing: Set[str]) -> ImageSupport:
        """Return the same, with more images missing."""
        return replace(self, missing=self.missing | missing)


def refused(episode: Episode, image_support: ImageSupport | None) -> str | None:
    """Return the reason why a model with this support of images can train no token of an episode; None if it can."""
    names = {image.hash for node in episode.nodes for image in node.images}
    if image_support is None:
        return UNSEEN if names else None
    if names & image_support.missing:
        return MISSING
    stray = any(_has_stray(node, image_support.placeholder) for node in episode.nodes)
    return PLACEHOLDER if stray or _cuts(episode) else None


def masked(group: Group, image_support: ImageSupport | None) -> Group:
    """Return a group in which the sampled nodes of episodes that are left out have the reason, for the reports."""
    reasons = [refused(episode, image_support) for episode in group.episodes]
    if not any(reasons):
        return group
    pairs = zip(group.episodes, reasons, strict=True)
    return replace(group, episodes=tuple(_masked(episode, why) if why else episode for episode, why in pairs))


def _masked(episode: Episode, why: str) -> Episode:
    nodes = (replace(node, mask_reason=why) if node.sampled else node for node in episode.nodes)
    return replace(episode, nodes=tuple(nodes))


def names_in(groups: Iterable[Group]) -> dict[str, int]:
    """Return the hashes of the images in groups, in order, each with its number of tokens."""
    return {
        image.hash: image.length
        for group in groups
        for episode in group.episodes
        for node in episode.nodes
        for image in node.images
    }


def _has_stray(node: Node, placeholder: int) -> bool:
    """Return true if a placeholder belongs to no image, or an image has another token."""
    of_image = np.zeros(len(node.ids), np.bool_)
    for image in node.images:
        of_image[image.offset : image.offset + image.length] = True
    return bool(((node.ids == placeholder) != of_image).any())


def _cuts(episode: Episode) -> bool:
    """Return true if a path leaves a node in the middle of an image."""
    nodes = {node.index: node for node in episode.nodes}
    return any(
        image.offset < child.at < image.offset + image.length
        for child in episode.nodes
        if child.parent >= 0
        for image in nodes[child.parent].images
    )
