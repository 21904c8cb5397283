"""Decoder layers compiled by torch: norms, rotary positions, activations and their gradients in a few kernels each.

Attention stays outside of the graphs, as `trainer.model.attention` disables the compiler for it, and has a kernel of its own.
Layers of one kind share their graphs, of which there is one for each part of a layer between calls and kind of pass (with and
without gradients); the number of tokens is a variable of theirs. Owns no state. Invariant: a pass that is not within
`Policy.at_work`, such as the model's own in the start check, is not compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from trainer.config.model import ModelSettings
from trainer.errors import ConfigError


def is_wanted(settings: ModelSettings, device: str, tensor: int, expert: int, *, has_states: bool) -> bool:
    """Return whether layers are compiled; by default, on a GPU where they can be.

    `has_states`: some have a state (`trainer.model.recurrent`). Raise ConfigError if they are to be compiled and cannot.
    """
    why = _refusal(settings, tensor, expert, has_states=has_states)
    if settings.compile == "auto":
        return device.startswith("cuda") and not why
    if settings.compile is True and why:
        raise ConfigError(f"[model] compile = true: {why}; set it to false")
    return settings.compile is True


def _refusal(settings: ModelSettings, tensor: int, expert: int, *, has_states: bool) -> str:
    """Return why layers cannot be compiled; an empty string if they can."""
    if settings.attention != "spans":
        return 'attention = "rows" computes each row by the model\'s own attention, which is not compiled'
    if settings.router_replay:
        return "router_replay = true replaces a call within the routers, which a graph does not see"
    if tensor > 1:
        return f"[parallel] tensor = {tensor} divides matrices in a way that is not compiled"
    if expert > 1:
        return f"[parallel] expert = {expert} exchanges numbers of tokens that a graph does not know"
    if has_states:
        return "layers of this model have a state, and compute a row in pieces, each of another length"
    return ""


def compile_layers(layers: Sequence[nn.Module], backend: Any = "inductor") -> None:
    """Compile the passes of layers; before they are checkpointed and sharded, which both stay outside of the graphs."""
    # Inductor otherwise times reductions whose order of sums differs, and a restart may choose another one.
    exact = backend == "inductor" and torch.are_deterministic_algorithms_enabled()
    options: dict[str, Any] | None = {"deterministic": True} if exact else None
    for layer in layers:
        graph = torch.compile(layer.forward, dynamic=True, backend=backend, options=options)
        layer.forward = partial(_pass, layer, layer.forward, graph)


def _pass(
    layer: Any, forward: Callable[..., Any], graph: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    return (forward if layer.spans.forest is None else graph)(*arguments, **named)


def graphs() -> int:
    """Return the number of graphs that this process has compiled so far, attention's included."""
    return int(counters["stats"]["unique_graphs"])
