"""Layers with a state (gated delta nets, state-space layers, short convolutions) over a forest of token spans.

Attention sees by a mask; a layer with a state sees what was computed before. So the forest is cut into pieces, at each of which
state and convolution start again: empty at the beginning of a row, or as they were where the piece's row branches off. A common
prefix is computed once, and gradients pass through the copied states. The layer's own forward pass computes a piece: the states
are given and taken by the interface of transformers' caches, so this holds for all families, and for their kernels.
Owns no state between passes. Invariants:
- a layer that continues a state is never given one token: kernels for generation, which have no gradient, would compute that;
- without a forest, and for a single row, the layer's forward pass is unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from trainer.errors import ConfigError

_CACHES = ("cache_params", "past_key_values")
"""The names under which layers receive their states."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that are computed in one pass of a layer."""

    start: int
    stop: int
    before: int
    """The piece whose states this one continues; -1: none."""
    lead: int = -1
    """The token before `start`, if it is computed again, since it is a piece of one token; -1: it is not."""

    @property
    def is_short(self) -> bool:
        """True if a layer would be given one token in addition to a state."""
        return self.before >= 0 and self.lead < 0 and self.stop - self.start == 1


class Pieces(Protocol):
    """The part of a forest that layers need."""

    @property
    def pieces(self) -> Sequence[Piece]:
        """The pieces, in the order of their tokens."""


class Holder(Protocol):
    """Has the forest of the micro-batch at work."""

    @property
    def forest(self) -> Pieces | None:
        """None: there is none."""


def pieces_of(positions: npt.NDArray[np.int64]) -> list[Piece]:
    """Return the pieces of a forest by its tokens' positions, shape (tokens,)."""
    tokens = len(positions)
    begins = np.flatnonzero(np.diff(positions, prepend=-2) != 1).tolist()
    path, parents = np.empty(0, np.int64), dict[int, int]()
    for start, stop in zip(begins, [*begins[1:], tokens], strict=True):
        shared = int(positions[start])
        parents[start] = int(path[shared - 1]) if shared else -1
        path = np.concatenate([path[:shared], np.arange(start, stop)])
    starts = sorted({*begins, *(parent + 1 for parent in parents.values() if parent >= 0)})
    number_by_end = {stop - 1: number for number, stop in enumerate([*starts[1:], tokens])}
    found: list[Piece] = []
    for start, stop in zip(starts, [*starts[1:], tokens], strict=True):
        parent = parents.get(start, start - 1)
        piece = Piece(start, stop, number_by_end[parent] if parent >= 0 else -1)
        if piece.before >= 0 and found[piece.before].is_short:
            piece = Piece(start, stop, found[piece.before].before, lead=parent)
        found.append(piece)
    return found


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers with a state: each has a convolution, and receives a cache."""
    return [
        module
        for module in model.modules()
        if any(isinstance(child, nn.Conv1d) for child in module.children()) and _cache_name(module)
    ]


def install(model: nn.Module, holder: Holder) -> None:
    """Make the layers with a state compute the forest in `holder` by its pieces."""
    for layer in layers_of(model):
        compute = _forward if _continues(layer) else _refuse
        layer.forward = partial(compute, layer.forward, _cache_name(layer), holder)


def _cache_name(module: nn.Module) -> str:
    """Return the name of the parameter of a module's forward pass that is a cache; empty if it has none."""
    parameters = inspect.signature(type(module).forward).parameters
    return next((name for name in _CACHES if name in parameters), "")


def _continues(layer: nn.Module) -> bool:
    """Return true if a layer's pass over several tokens begins with a given state. Mamba-1's begins with an empty one."""
    source = inspect.getsource(type(layer).forward)
    return "update_recurrent_state" not in source or "initial_state" in source


@dataclass(slots=True)
class _States:
    """The states after a piece, in the interface of a cache of transformers; each layer has its own."""

    recurrent: dict[int, Tensor] = field(default_factory=dict)
    convolved: dict[int, Tensor] = field(default_factory=dict)
    """The last inputs of each convolution."""

    def copy(self) -> _States:
        return _States({**self.recurrent}, {**self.convolved})

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        """Return None, by which a layer computes its convolution over what `update_conv_state` returns."""

    def get_recurrent_state(self, layer_idx: int = 0, state_idx: int = 0) -> Tensor | None:
        return self.recurrent.get(state_idx)

    def is_recording_past(self, *_: Any) -> bool:
        return True

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int = 0,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        before = self.convolved.get(state_idx)
        whole = conv_states if before is None else torch.cat([before, conv_states], -1)
        self.convolved[state_idx] = whole[..., -(conv_kernel_size or whole.shape[-1]) :]
        return whole

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int = 0, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self.recurrent[state_idx] = recurrent_states
        return recurrent_states


def _forward(
    forward: Callable[..., Tensor],
    cache: str,
    holder: Holder,
    hidden_states: Tensor,
    *rest: Any,
    **named: Any,
) -> Tensor:
    """Compute a layer piece by piece."""
    pieces = holder.forest.pieces if holder.forest is not None else ()
    if len(pieces) <= 1:
        return forward(hidden_states, *rest, **named)
    continued = {piece.before for piece in pieces}
    states: list[_States | None] = []
    found: list[Tensor] = []
    for number, piece in enumerate(pieces):
        before = states[piece.before] if piece.before >= 0 else None
        own = before.copy() if before is not None else _States() if number in continued else None
        computed = forward(_tokens(hidden_states, piece), *rest, **{**named, cache: own})
        first = piece.lead >= 0
        found.append(computed[:, first : first + piece.stop - piece.start])
        states.append(own)
    return torch.cat(found, 1)


def _refuse(forward: Callable[..., Tensor], _: str, holder: Holder, *rest: Any, **named: Any) -> Tensor:
    """Compute a layer that cannot continue a state. Raise ConfigError where it would have to."""
    if holder.forest is not None and len(holder.forest.pieces) > 1:
        name = getattr(forward, "__qualname__", "").partition(".")[0]
        raise ConfigError(
            f'[model] attention = "spans": {name} cannot continue a state; set attention = "rows": every path is then'
            " computed separately"
        )
    return forward(*rest, **named)


def _tokens(hidden: Tensor, piece: Piece) -> Tensor:
    """Return the inputs of a piece, shape (1, tokens, width); a single token twice, of which the first counts."""
    own = hidden[:, piece.start : piece.stop]
    if piece.lead >= 0:
        return torch.cat([hidden[:, piece.lead : piece.lead + 1], own], 1)
    return torch.cat([own, own], 1) if piece.is_short else own
