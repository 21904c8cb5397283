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
from torch import Tensor, nn
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
        self._routes: Tensor | None = None
        for number, block in enumerate(self.blocks):
            block.forward = partial(self._forward, block.forward, number)

    @contextmanager
    def using(self, routes: Tensor | None) -> Iterator[None]:
        """Replay `routes` in the block, of shape (tokens, layers, top_k) and -1 where there are none. None: no replay."""
        before, self._routes = self._routes, routes
        try:
            yield
        finally:
            self._routes = before

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return contexts of a checkpointed layer's forward pass and of its recomputation, which has the same routes."""
        return nullcontext(), self.using(self._routes)

    def _forward(self, forward: Callable[..., Any], number: int, *arguments: Any, **named: Any) -> Any:
        if self._routes is None:
            return forward(*arguments, **named)
        with _Choice(self.shape, self._routes[:, number]) as choice:
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
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))  # type: ignore[attr-defined]


@torch.no_grad()
def check(model: Any, replay: RouterReplay) -> None:
    """Raise ConfigError unless all experts are given the routes of a short pass. Collective, if the weights are shared."""
    shape, device = replay.shape, next(model.parameters()).device
    tokens = 8
    # Each expert follows the one before it, from another one in each token and layer.
    first = torch.arange(tokens)[:, None, None] + torch.arange(len(shape.layers))[None, :, None]
    routes = ((first + torch.arange(shape.top_k)) % shape.experts).to(device)
    found: list[bool] = []

    def look(number: int, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        found.append(_replays([*arguments, *named.values()], routes[:, number]))

    hooks = [
        block.experts.register_forward_pre_hook(partial(look, number), with_kwargs=True)  # type: ignore[union-attr, operator]
        for number, block in enumerate(replay.blocks)
    ]
    try:
        with replay.using(routes):
            model.get_decoder()(
                input_ids=torch.zeros(1, tokens, dtype=torch.int64, device=device), use_cache=False
            )
    except RuntimeError as error:
        raise refused(model, str(error).strip().splitlines()[0]) from error
    finally:
        for hook in hooks:
            hook.remove()
    if len(found) != len(replay.blocks) or not all(found):
        raise refused(
            model, "its router does not compute the weights of experts that it did not choose itself"
        )


def _replays(given: list[Any], routes: Tensor) -> bool:
    """Return true if experts are given these routes, each with a weight."""
    tensors = [each for each in given if isinstance(each, Tensor) and each.shape == routes.shape]
    chosen = [each for each in tensors if not each.is_floating_point()]
    weights = [each for each in tensors if each.is_floating_point()]
    return bool(chosen and weights and (chosen[0] == routes).all() and (weights[0] != 0).all())


def refused(model: Any, why: str) -> ConfigError:
    """Return the error of a model that cannot replay routes."""
    return ConfigError(
        f"[model] router_replay = true: {type(model).__name__}: {why}; set it to false, and no recorded route is used"
    )
