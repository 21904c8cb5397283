"""Router replay: the routers of a mixture take recorded experts and compute only their weights.

One seam for all families of transformers: each block of experts chooses by one `topk` over the experts' scores. Within a block's
forward pass that call returns the recorded experts with their scores; what a family does before and after (softmax, sigmoid,
bias, groups, normalization, scaling) is its own code. So gradients reach the router through the weights of the chosen experts.
Owns the routes of the pass in progress. Invariants:
- a block chooses once in each pass, else the pass fails;
- a token without recorded routes has the model's own choice;
- without routes nothing of a block's forward pass changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headgate.routes import RouterShape, router_shape
from trainer.errors import ConfigError

_TOPK: tuple[Any, ...] = (torch.topk, Tensor.topk)


class RouterReplay:
    """The blocks of experts of one model, in its order."""

    def __init__(self, model: Any) -> None:
        """Change the forward pass of the blocks. Raise ConfigError if the model has no routers, or not those of its config."""
        try:
            shape = router_shape(model.config.to_dict())
        except ValueError as error:
            raise refused(model, str(error)) from error
        if shape is None:
            raise refused(model, "it is not a mixture of experts")
        self.shape: RouterShape = shape
        self.blocks = [module for module in model.get_decoder().modules() if "experts" in module._modules]
        if len(self.blocks) != len(shape.layers):
            raise refused(
                model,
                f"{len(self.blocks)} of its layers have experts, and its config names {len(shape.layers)}",
            )
        self.routes: Tensor | None = None
        """Those of the pass in progress."""
        for number, block in enumerate(self.blocks):
            block.forward = partial(self._forward, block.forward, number)

    @contextmanager
    def using(self, routes: Tensor | None) -> Iterator[None]:
        """Replay `routes` in the block, of shape (tokens, layers, top_k) and -1 where there are none. None: no replay."""
        before, self.routes = self.routes, routes
        try:
            yield
        finally:
            self.routes = before

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return contexts of a checkpointed layer's forward pass and of its recomputation, which has the same routes."""
        return nullcontext(), self.using(self.routes)

    def _forward(self, forward: Callable[..., Any], number: int, *arguments: Any, **named: Any) -> Any:
        if self.routes is None:
            return forward(*arguments, **named)
        with _Choice(self.shape, self.routes[:, number]) as choice:
            found = forward(*arguments, **named)
        if choice.count != 1:
            raise RuntimeError(f"block {number} of experts chose {choice.count} times, and not once")
        return found


class _Choice(TorchFunctionMode):
    """Replaces the choice of experts."""

    def __init__(self, shape: RouterShape, routes: Tensor) -> None:
        """`routes`: those of one layer, of shape (tokens, top_k)."""
        super().__init__()
        self.count = 0
        self._shape = shape
        self._routes = routes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return found
        scores = args[0] if args else (kwargs or {})["input"]
        if scores.shape[-1] != self._shape.experts or found.indices.shape != self._routes.shape:
            return found  # a choice of groups
        self.count += 1
        chosen = torch.where(self._routes < 0, found.indices, self._routes)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


def refused(model: Any, why: str) -> ConfigError:
    """Return the error of a model that cannot replay routes."""
    return ConfigError(
        f"[model] router_replay = true: {type(model).__name__}: {why}; set it to false, and no recorded route is used"
    )
