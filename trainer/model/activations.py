"""Activation checkpointing: layers that keep only their inputs for the backward pass, and compute the rest again in it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.errors import ConfigError


def checkpoint_layers(layers: Sequence[nn.Module], every: int) -> None:
    """Makes layers 0, `every`, 2 x `every`, ... keep only their inputs; `every` = 0 changes none. Before they are sharded.

    Gradients stay the same to the bit. Raises ConfigError if there are no layers.
    """
    if every == 0:
        return
    if not layers:
        raise ConfigError(
            f"[model] activation_checkpointing = {every}: this architecture has no list of layers; set it to 0"
        )
    for layer in layers[::every]:
        # `forward` and not `__call__`: FSDP's hooks stay outside, and do not run again. Dropout is off: no random state.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
