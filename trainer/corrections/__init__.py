"""Corrections for tokens that the policy being trained would have sampled differently, by name.

A correction weighs tokens, a mask leaves them out; both are pure functions of the ratios. To add one: write its file, and add its
line to `CORRECTIONS` or `MASKS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from trainer.corrections.icepop import icepop
from trainer.corrections.mask_geometric import mask_geometric
from trainer.corrections.mask_sequence import mask_sequence
from trainer.corrections.mask_token import mask_token
from trainer.corrections.none import none
from trainer.corrections.ratio import Ratios
from trainer.corrections.tis_sequence import tis_sequence
from trainer.corrections.tis_token import tis_token


@dataclass(frozen=True, slots=True)
class Correction:
    """One correction or mask."""

    apply: Callable[[Ratios, float, float], Tensor]
    """Called with the ratios and the least and greatest ratio; answers shape (trained,)."""
    whole_episodes: bool = False
    """True if it needs all trained tokens of an episode in one micro-batch."""


CORRECTIONS = {
    "none": Correction(none),
    "tis_token": Correction(tis_token),
    "tis_sequence": Correction(tis_sequence, whole_episodes=True),
    "icepop": Correction(icepop),
}
"""The value of `[algorithm] correction`."""

MASKS = {
    "mask_token": Correction(mask_token),
    "mask_sequence": Correction(mask_sequence, whole_episodes=True),
    "mask_geometric": Correction(mask_geometric, whole_episodes=True),
}
"""The key of `[algorithm]` that turns the mask on by giving its bounds."""
