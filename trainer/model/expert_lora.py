"""LoRA on a mixture's experts: for each expert's part of a tensor, the product of two thin matrices of its own.

transformers has the experts of a layer in tensors of shape (experts, out, in), which no linear layer owns. peft would add the
products to them in each pass, rounded to the tensor's precision; here a token's hidden state goes through its expert's factors as
through a linear layer's, by the same grouped products as through the expert. Owns the factors' names and shapes.
Invariants: a module's factors are parameters of it, with one part for each expert, so that ranks share them as they share the
experts (`expert_parallel`); with B zero, a pass equals transformers' own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations import moe

_ALIGNED = 16
"""Bytes that a row of a grouped product's factor is a multiple of."""


class AdaptedExperts:
    """The experts of one layer, some of whose tensors have adapters."""

    def __init__(
        self, module: Any, keys: Sequence[str], rank: int, scale: float, masters: torch.dtype
    ) -> None:
        """`keys`: the tensors, in the module's order; A has shape (experts, rank, in) and B (experts, rank, out)."""
        self.module = module
        self.keys = keys
        self._scale = scale
        for key in keys:
            experts, *sides = module._parameters[key].shape
            out, inner = reversed(sides) if module.is_transposed else sides
            for name, size in zip(factor_names(key), (inner, out), strict=True):
                factor = torch.empty(experts, rank, size, dtype=masters, device="meta")
                module.register_parameter(name, nn.Parameter(factor))

    def factors(self, key: str) -> tuple[Tensor, Tensor]:
        """Return A and B of a tensor."""
        a, b = (self.module._parameters[name] for name in factor_names(key))
        return a, b

    def adapted(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts with their adapters, of shape (tokens, width) as `hidden` is.

        `chosen`, `weights`: the experts of each token and their weights, of shape (tokens, top_k).
        """
        module = self.module
        experts, order = chosen.reshape(-1).sort(stable=True)
        every = torch.arange(module.num_experts, device=experts.device)
        ends = torch.searchsorted(experts, every, right=True, out_int32=True)
        rows = hidden[order // chosen.shape[-1]]
        rows = self._product("gate_up_proj" if module.has_gate else "up_proj", rows, experts, ends)
        rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
        rows = self._product("down_proj", rows, experts, ends)
        rows = rows * weights.reshape(-1)[order, None]
        found: Tensor = rows[order.argsort()].view(*chosen.shape, hidden.shape[-1]).sum(1)
        return found.to(hidden.dtype)

    def _product(self, key: str, rows: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        """Return what the experts' matrices make of rows that are sorted by expert, of which each ends at `ends`."""
        module = self.module
        bias = getattr(module, f"{key}_bias")[experts] if module.has_bias else None
        found: Tensor = moe._grouped_linear(rows, getattr(module, key), ends, bias, module.is_transposed)
        if key not in self.keys:
            return found
        a, b = self.factors(key)
        more = -a.shape[1] % (_ALIGNED // a.element_size())
        a, b = (F.pad(factor, (0, 0, 0, more)) for factor in (a, b))
        added: Tensor = moe._grouped_mm(moe._grouped_mm(rows, a.mT, ends), b, ends)
        return found + self._scale * added


def of_peft(
    name: str, experts: AdaptedExperts, factors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the factors of the experts `name` by the names and in the shapes of peft, which wraps one tensor after another.

    `factors`: whole, by the names of the model's parameters.
    """
    for number, key in enumerate(experts.keys):
        a, b = (factors[f"{name}.{factor}"] for factor in factor_names(key))
        place = ".".join([name, *["base_layer"] * (len(experts.keys) - 1 - number)])
        yield f"{place}.lora_A.weight", a.flatten(0, 1)
        yield f"{place}.lora_B.weight", b.permute(2, 1, 0).flatten(1)


def tensors_of(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, list[str]]:
    """Return the names of the tensors of experts in those of `modules` that have some."""
    experts = ((name, module) for name, module in modules if name.rpartition(".")[2] == "experts")
    found = {
        name: [key for key, weight in module._parameters.items() if weight is not None and weight.ndim == 3]
        for name, module in experts
    }
    return {name: keys for name, keys in found.items() if keys}


def factor_names(key: str) -> tuple[str, str]:
    """Return what A and B of a tensor are named in its module."""
    return f"{key}_lora_A", f"{key}_lora_B"
