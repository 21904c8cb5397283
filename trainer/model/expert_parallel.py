"""Expert parallelism: ranks that each own some experts of every mixture layer, and exchange the tokens that go through them.

A part of `parallel`. The tensors of a layer's experts become DTensors that are split by expert; a token is sent to the owners of
its experts, and what they compute is sent back. The owners compute by transformers' own forward pass of the experts, a grouped
product where the device has one and a loop where not, as for a module that has only their experts.
Owns the counts of tokens by expert. Invariants: no token is dropped; the sum of a token's experts is weighted where the token is,
in the order of its routes, so that a pass equals one rank's; every rank's pass has the same exchanges, also without tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainer.errors import ConfigError


class Experts:
    """The experts of one model, of which this rank owns a part in every layer."""

    def __init__(self, modules: Sequence[Any], mesh: DeviceMesh) -> None:
        """`modules`: see `modules_of`; `mesh`: the ranks that share them, in one dimension."""
        self.modules = modules
        self._mesh = mesh
        self._ranks = mesh.size()
        self._group = mesh.get_group()
        self._owned = modules[0].num_experts // self._ranks
        self._counts: dict[int, Tensor] = {}
        for number, module in enumerate(modules):
            for name, weight in module._parameters.items():
                split = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
                module._parameters[name] = nn.Parameter(split, requires_grad=weight.requires_grad)
            module.num_experts = self._owned
            module.forward = partial(self._forward, number, module.forward)

    def _forward(
        self, number: int, forward: Callable[..., Tensor], hidden: Tensor, chosen: Tensor, weights: Tensor
    ) -> Tensor:
        """Return the weighted sum of each token's experts, of shape (tokens, width) as `hidden` is. Collective.

        `chosen`, `weights`: the experts of each token and their weights, of shape (tokens, top_k).
        """
        experts = chosen.reshape(-1)
        order = experts.argsort(stable=True)
        sent = torch.bincount(experts // self._owned, minlength=self._ranks)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        sizes = sent.tolist(), received.tolist()
        rows = self._exchange(hidden[order // chosen.shape[-1]], *sizes)
        owned = self._exchange(experts[order] % self._owned, *sizes)
        if torch.is_grad_enabled():
            self._count(number, owned)
        computed = self._run_experts(self.modules[number], forward, rows, owned)
        parts = self._exchange(computed, *reversed(sizes))[order.argsort()]
        total = (parts * weights.reshape(-1, 1)).view(*chosen.shape, hidden.shape[-1]).sum(1)
        return total.to(hidden.dtype)

    def _exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        found: Tensor = _Exchange.apply(rows, sent, received, self._group)
        return found

    def _run_experts(
        self, module: nn.Module, forward: Callable[..., Tensor], rows: Tensor, owned: Tensor
    ) -> Tensor:
        """Return what the owned experts make of the rows that were received, each for one expert."""
        # Its forward pass does not know DTensors.
        parts = {name: _part(weight) for name, weight in module.named_parameters(recurse=False)}
        with replaced(module, parts):
            if len(rows):
                return forward(rows, owned[:, None], rows.new_ones(len(rows), 1))
            # Other ranks wait for this one's exchanges in the backward pass as well.
            return rows + 0.0 * sum(weight.sum() for weight in module.parameters(recurse=False))

    def _count(self, number: int, owned: Tensor) -> None:
        count = torch.bincount(owned, minlength=self._owned)
        before = self._counts.get(number)
        self._counts[number] = count if before is None else before + count

    def pop_counts(self) -> tuple[int, list[list[int]]]:
        """Return the first expert that this rank owns, and the tokens since the last call by layer and owned expert."""
        none = [0] * self._owned
        layers = range(len(self.modules))
        counts = [self._counts[n].tolist() if n in self._counts else none for n in layers]
        self._counts.clear()
        return self._mesh.get_local_rank() * self._owned, counts


def modules_of(model: Any, ranks: int) -> list[Any]:
    """Return the experts of each layer of a model. Raise ConfigError, alike on every rank, if `ranks` cannot share them."""
    name = type(model).__name__
    found = [block.experts for block in model.get_decoder().modules() if "experts" in block._modules]
    if not found:
        raise _refused(ranks, f"{name} is not a mixture of experts; leave it out")
    if not all(has_parts(module) for module in found):
        raise _refused(
            ranks, f"the experts of {name} are not tensors with one part for each expert; leave it out"
        )
    count = found[0].num_experts
    if count % ranks:
        raise _refused(ranks, f"{name} has {count} experts, which cannot be divided by it")
    return found


def has_parts(module: Any) -> bool:
    """Return true if experts are tensors with one part for each, and multiply their results by the weights of routes.

    Others, whose inputs are multiplied, lack what transformers sets.
    """
    return hasattr(module, "_is_expert_parallel") and all(
        weight.shape[:1] == (module.num_experts,) for weight in module.parameters()
    )


def sharded_dimension(weight: Tensor) -> Shard:
    """Return how the ranks that own the same experts shard a tensor of them.

    By the last dimension: stored experts are joined along the others when a checkpoint is read.
    """
    return Shard(weight.ndim - 1)


def balance_metrics(counted: Sequence[tuple[int, list[list[int]]]]) -> dict[str, float]:
    """Return the metrics of a step from what all ranks counted; empty if no token was routed."""
    layers = len(counted[0][1])
    total: list[dict[int, int]] = [{} for _ in range(layers)]
    owners: list[dict[int, int]] = [{} for _ in range(layers)]
    for first, counts in counted:
        for number, count in enumerate(counts):
            owners[number][first] = owners[number].get(first, 0) + sum(count)
            for expert, tokens in enumerate(count, first):
                total[number][expert] = total[number].get(expert, 0) + tokens
    if not all(sum(each.values()) for each in total):
        return {}
    return {
        "busiest_expert_share": max(max(each.values()) / sum(each.values()) for each in total),
        "busiest_expert_rank_share": max(max(each.values()) / sum(each.values()) for each in owners),
    }


class _Exchange(torch.autograd.Function):
    """Sends rows to the ranks, in their order, and returns the rows that they sent to this one; its gradient goes back."""

    @staticmethod
    def forward(
        context: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any
    ) -> Tensor:
        context.arguments = received, sent, group
        found = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), [*received], [*sent], group=group)
        return found

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(gradient, *context.arguments), None, None, None


def _part(weight: Tensor) -> Tensor:
    """Return what this rank owns of a tensor, with its gradient."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


@contextmanager
def replaced(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Let a module compute by other tensors in the place of its own in the block."""
    own = dict(module._parameters)
    module._parameters.update(tensors)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(own)


def _refused(ranks: int, why: str) -> ConfigError:
    return ConfigError(f"[parallel] expert = {ranks}: {why}")
