"""Activation checkpointing: layers that keep only their inputs for the backward pass, and compute the rest again in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, noop_context_fn

from trainer.errors import ConfigError

Keep = Callable[[], AbstractContextManager[Any]]
"""Makes a context in which autograd keeps tensors in some place of its own."""
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Makes the contexts of a layer's forward pass and of its recomputation."""


def on_host() -> AbstractContextManager[Any]:
    """Keep autograd's tensors in the host's memory until the backward pass; pinned if there is an accelerator."""
    return save_on_cpu(pin_memory=True)


def checkpoint_layers(
    layers: Sequence[nn.Module], every: int, keep: Keep = nullcontext, contexts: Contexts = noop_context_fn
) -> None:
    """Make layers 0, `every`, 2 x `every`, ... keep only their inputs; `every` = 0 changes none. Before they are sharded.

    `keep` stores the inputs; `contexts` is called at each forward pass. Gradients stay the same bit by bit. Raise ConfigError if
    there are no layers.
    """
    if every == 0:
        return
    if not layers:
        raise ConfigError(
            f"[model] activation_checkpointing = {every}: this architecture has no list of layers; set it to 0"
        )
    for layer in layers[::every]:
        # `forward` and not `__call__`: FSDP's hooks stay outside, and do not run again. Dropout is off: no random state.
        layer.forward = partial(_recomputed, layer.forward, keep, contexts)


def _recomputed(
    forward: Callable[..., Any], keep: Keep, contexts: Contexts, *arguments: Any, **named: Any
) -> Any:
    # What the layer keeps within is checkpoint's own affair: `keep` gets its inputs alone.
    with keep():
        return checkpoint(
            forward,
            *arguments,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=contexts,
            **named,
        )
