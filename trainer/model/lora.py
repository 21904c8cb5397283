"""LoRA: frozen weights, and for each chosen matrix the trained product of two thin ones, `alpha / rank * B A`.

Source: Hu et al., "LoRA" (2021). peft puts the adapters into linear layers and computes the pass that is trained; for a mixture's
experts, `expert_lora` does. Owns the factors' initial values. Invariants: no weight of the base ever changes; `merged` is the one
formula of the weights as published, by which versions are written and by which they are probed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from headgate.weights.adapter import FACTORS
from trainer.config.model import LoraSettings
from trainer.model import expert_lora, expert_parallel, lora_targets, parallel, vision
from trainer.model.expert_lora import AdaptedExperts
from trainer.model.parallel import State

_NAME = "default"
"""peft's for an adapter that is the only one."""
Weights = Literal["adapted", "initial", "merged"]


@dataclass(frozen=True, slots=True)
class _Adapted:
    """A weight and its factors, by the modules that have them: sharding replaces the tensors."""

    weight: tuple[nn.Module, str]
    a: tuple[nn.Module, str]
    b: tuple[nn.Module, str]
    transposed: bool
    """True if the weight has shape (in, out)."""

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weight, A of shape (rank, in), and B of shape (out, rank); for experts, with one such part for each."""
        weight, a, b = (getattr(module, name) for module, name in (self.weight, self.a, self.b))
        return weight, a, b.mT if b.ndim == 3 else b


class Adapters:
    """The adapters of one model, and the weights by which its layers compute; `adapt` makes it."""

    def __init__(
        self, model: nn.Module, config: LoraConfig, dtype: torch.dtype, experts: Mapping[str, AdaptedExperts]
    ) -> None:
        """`experts`: those with adapters, by their modules' names."""
        self.dtype = dtype
        """The precision in which weights are published, and in which passes compute."""
        self.of_experts = bool(experts)
        self._model = model
        self._scale = config.lora_alpha / config.r
        self._experts = experts
        layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
        self._config = _by_full_names(model, config, [*layers])
        self._weights: Weights = "adapted"
        self._adapted = {f"{name}.weight": _of_layer(layer) for name, layer in layers.items()}
        for name, layer in layers.items():
            layer.forward = partial(self._forward, layer, self._adapted[f"{name}.weight"], layer.forward)
        for name, each in experts.items():
            own = {key: _of_experts(each, key) for key in each.keys}
            self._adapted |= {f"{name}.{key}": adapted for key, adapted in own.items()}
            each.module.forward = partial(self._run_experts, each, own, each.module.forward)

    def _forward(self, layer: Any, own: _Adapted, adapted: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self._weights == "adapted":
            return adapted(x)
        found: Tensor
        if self._weights == "initial":
            found = layer.base_layer(x)
        else:
            weight = self._merged(own, *own.tensors()).to(x.dtype)
            found = torch.func.functional_call(layer.base_layer, {"weight": weight}, (x,))
        return found

    def _run_experts(
        self,
        experts: AdaptedExperts,
        own: Mapping[str, _Adapted],
        initial: Callable[..., Tensor],
        hidden: Tensor,
        chosen: Tensor,
        weights: Tensor,
    ) -> Tensor:
        if self._weights == "adapted":
            return experts.adapted(hidden, chosen, weights)
        if self._weights == "initial":
            return initial(hidden, chosen, weights)
        merged = {key: self._merged(each, *each.tensors()).to(hidden.dtype) for key, each in own.items()}
        with expert_parallel.replaced(experts.module, merged):
            return initial(hidden, chosen, weights)

    def _merged(self, own: _Adapted, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return merged(weight, a, b, self._scale, self.dtype, transposed=own.transposed)

    @contextmanager
    def computing(self, weights: Weights) -> Iterator[None]:
        """Make passes without gradient in the block compute by the initial weights, or by the published ones."""
        before, self._weights = self._weights, weights
        try:
            yield
        finally:
            self._weights = before

    @torch.no_grad()
    def initialize(self, device: str, seed: int) -> None:
        """Make the factors on `device`: A uniform as peft has it, the same on any number of ranks, and B zero."""
        generator = torch.Generator().manual_seed(seed)
        for each in self._adapted.values():
            for module, name in (each.a, each.b):
                setattr(module, name, nn.Parameter(torch.zeros_like(getattr(module, name), device=device)))
            a: Tensor = getattr(*each.a)
            value = torch.empty(a.shape, dtype=a.dtype)
            nn.init.kaiming_uniform_(value.view(-1, a.shape[-1]), a=math.sqrt(5), generator=generator)
            parallel.put(a, value)

    def base_of(self, module: nn.Module) -> nn.Module:
        """Return the module that has the weights which `module` had before it was adapted."""
        base: nn.Module = module.base_layer if isinstance(module, Linear) else module
        return base

    def published(self) -> State:
        """Return the merged weights by their names without adapters; each is made when it is called. Collective."""
        found: State = {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in self._model.state_dict(keep_vars=True).items()
            if not tensor.requires_grad
        }
        return found | {name: partial(self._whole, own) for name, own in self._adapted.items()}

    def _whole(self, own: _Adapted) -> Tensor:
        return self._merged(own, *(parallel.whole(tensor.detach()) for tensor in own.tensors()))

    @torch.no_grad()
    def merged_share(self) -> float:
        """Return the share of what is trained that `merged` does not round away; NaN before anything is. Collective.

        <r(W + D) - W, D> / <D, D>, summed over all adapted matrices, with D = alpha / rank * B A and r the rounding of published
        weights: 1 if all of it survives, 0 if every weight rounds back.
        """
        kept = whole = 0.0
        for own in self._adapted.values():
            weight, a, b = (parallel.whole(tensor.detach()) for tensor in own.tensors())
            added = _added(weight, a, b, self._scale, self.dtype, transposed=own.transposed)
            change = self._merged(own, weight, a, b).to(added.dtype) - weight.to(added.dtype)
            kept += float((change * added).sum(dtype=torch.float64))
            whole += float((added * added).sum(dtype=torch.float64))
        return kept / whole if whole else math.nan

    def factors(self) -> State:
        """Return the trained weights alone, by their names in the model. Collective where they are made whole."""
        return {name: weight for name, weight in self._model.named_parameters() if weight.requires_grad}

    def save(self, directory: Path, factors: Mapping[str, Tensor]) -> None:
        """Write adapters alone as peft reads them: `adapter_config.json` and `adapter_model.safetensors`.

        `factors`: see there; whole.
        """
        experts = [
            each for name, own in self._experts.items() for each in expert_lora.of_peft(name, own, factors)
        ]
        layers = (
            (name.replace(f".{_NAME}", ""), value) for name, value in factors.items() if f".{_NAME}." in name
        )
        parameters = {*(self._config.target_parameters or ())} | {
            f"{name}.{key}" for name, own in self._experts.items() for key in own.keys
        }
        replace(self._config, target_parameters=sorted(parameters) or None).save_pretrained(str(directory))
        tensors = {
            f"base_model.model.{name}": value.to("cpu", self.dtype).contiguous()
            for name, value in (*layers, *experts)
        }
        save_file(tensors, directory / FACTORS, {"format": "pt"})


def adapt(
    model: Any, settings: LoraSettings, path: Path, masters: torch.dtype, dtype: torch.dtype
) -> Adapters:
    """Freeze a model's weights and add adapters to the chosen layers and experts, on the meta device and in precision `masters`.

    Call it before ranks divide the experts. `path`: the model's checkpoint. Raise ConfigError if a target does not exist, or is
    not a matrix of its own.
    """
    chosen = lora_targets.chosen_experts(model, settings)
    names = (
        lora_targets.linear(model)
        if settings.targets == "all-linear"
        else lora_targets.of_layers(model, settings.targets)
    )
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=names,
        exclude_modules=rf"(.*\.)?({'|'.join(towers)})\..*" if (towers := vision.towers(model)) else None,
        task_type="CAUSAL_LM",
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        base_model_name_or_path=str(path),
    )
    model.requires_grad_(False)
    if names:
        _inject(model, config, settings, masters)
    scale = settings.alpha / settings.rank
    experts = {
        name: AdaptedExperts(model.get_submodule(name), keys, settings.rank, scale, masters)
        for name, keys in chosen.items()
    }
    return Adapters(model, config, dtype, experts)


def _inject(model: Any, config: LoraConfig, settings: LoraSettings, masters: torch.dtype) -> None:
    """Add adapters to linear layers. Raise ConfigError."""
    tied = {id(weight) for weight in _tied(model)}
    try:
        # Not the model itself: of one that peft knows, it would adapt experts in one tensor under their former names.
        inject_adapter_in_model(config, nn.ModuleDict({"model": model}), _NAME, low_cpu_mem_usage=True)
    except ValueError as error:
        raise lora_targets.refused(settings, str(error).splitlines()[0]) from error
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        if base is None:
            continue
        if not isinstance(module, Linear) or id(base.weight) in tied:
            raise lora_targets.refused(settings, f"{name} has no weight matrix of its own")
        for factor in (module.lora_A, module.lora_B):
            factor.to(masters)


def _by_full_names(model: nn.Module, config: LoraConfig, names: Sequence[str]) -> LoraConfig:
    """Return the configuration that chooses the layers `names` of a model, and no other, when peft loads it.

    Where a mixture's experts had layers of a last name once, peft takes a target that ends with it for the experts, whatever
    comes before: dense layers and shared experts of DeepSeek-V3 have such names. Those are chosen by their parameter.
    """
    ends = {name: name.rpartition(".")[2] for name in names}
    taken = {end for end in {*ends.values()} if _is_taken_for_experts(model, config, end)}
    return replace(
        config,
        target_modules=[name for name in names if ends[name] not in taken],
        target_parameters=[f"{name}.weight" for name in names if ends[name] in taken] or None,
        exclude_modules=None,
    )


def _is_taken_for_experts(model: nn.Module, config: LoraConfig, end: str) -> bool:
    converted = replace(config, target_modules=[end])
    try:
        convert_peft_config_for_transformers(converted, model, None)
    except ValueError:  # such a layer was one of several that are one tensor now
        return True
    return end not in converted.target_modules


def merged(
    weight: Tensor, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype, *, transposed: bool = False
) -> Tensor:
    """Return the weight, shape (out, in), with `scale * b @ a` added in float32 at least, rounded once: to `dtype`, or to the
    weight's own where that has more bits.

    `a` has shape (rank, in) and `b` (out, rank); they are rounded to `dtype` first, as a pass does. `transposed`: the weight has
    shape (in, out). All may have a first dimension more: the experts.
    """
    added = _added(weight, a, b, scale, dtype, transposed=transposed)
    return (weight.to(added.dtype) + added).to(torch.promote_types(weight.dtype, dtype))


def _added(
    weight: Tensor, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype, *, transposed: bool
) -> Tensor:
    """Return what `merged` adds to the weight, in its shape, in float32 at least."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    delta = scale * (b.to(dtype).to(wide) @ a.to(dtype).to(wide))
    return delta.mT if transposed else delta


def _of_layer(layer: Any) -> _Adapted:
    a, b = layer.lora_A[_NAME], layer.lora_B[_NAME]
    return _Adapted((layer.base_layer, "weight"), (a, "weight"), (b, "weight"), layer.fan_in_fan_out)


def _of_experts(experts: AdaptedExperts, key: str) -> _Adapted:
    module = experts.module
    a, b = expert_lora.factor_names(key)
    return _Adapted((module, key), (module, a), (module, b), module.is_transposed)


def _tied(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights that several modules have."""
    count: dict[int, int] = {}
    weights = [weight for _, weight in model.named_parameters(remove_duplicate=False)]
    for weight in weights:
        count[id(weight)] = count.get(id(weight), 0) + 1
    return [weight for weight in weights if count[id(weight)] > 1]
