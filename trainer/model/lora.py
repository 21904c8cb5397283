"""LoRA: frozen weights, and for each chosen matrix the trained product of two thin ones, `alpha / rank * B A`.

Source: Hu et al., "LoRA" (2021). peft puts the adapters in and computes the pass that is trained. Owns the factors' names and
initial values. Invariants: no weight of the base ever changes; `merged` is the one formula of the weights as published, by which
versions are written and by which they are probed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from trainer.errors import ConfigError
from trainer.model import parallel, vision
from trainer.model.parallel import State

_NAME = "default"
"""peft's for an adapter that is the only one."""
Weights = Literal["adapted", "initial", "merged"]


class Adapters:
    """The adapters of one model, and the weights by which its layers compute; `adapt` makes it."""

    def __init__(self, model: nn.Module, config: LoraConfig, dtype: torch.dtype) -> None:
        self.dtype = dtype
        """The precision in which weights are published, and in which passes compute."""
        self._model = model
        self._layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
        self._config = _by_full_names(model, config, [*self._layers])
        self._weights: Weights = "adapted"
        for layer in self._layers.values():
            layer.forward = partial(self._forward, layer, layer.forward)

    def _forward(self, layer: Any, adapted: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self._weights == "adapted":
            return adapted(x)
        found: Tensor
        if self._weights == "initial":
            found = layer.base_layer(x)
        else:
            weight = self._merged(layer, layer.base_layer.weight, *_factors(layer)).to(x.dtype)
            found = torch.func.functional_call(layer.base_layer, {"weight": weight}, (x,))
        return found

    def _merged(self, layer: Any, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return merged(weight, a, b, layer.scaling[_NAME], self.dtype, transposed=layer.fan_in_fan_out)

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
        for layer in self._layers.values():
            for module in (layer.lora_A[_NAME], layer.lora_B[_NAME]):
                module.weight = nn.Parameter(torch.zeros_like(module.weight, device=device))
            a = layer.lora_A[_NAME].weight
            value = torch.empty(a.shape, dtype=a.dtype)
            nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
            parallel.put(a, value)

    def base_of(self, module: nn.Module) -> nn.Module:
        """Return the module that has the weights which `module` had before it was adapted."""
        base: nn.Module = module.base_layer if isinstance(module, Linear) else module
        return base

    def published(self) -> State:
        """Return the merged weights by their names without adapters; each is made when it is called. Collective."""
        found: State = {}
        own = {id(factor) for layer in self._layers.values() for factor in _factors(layer)}
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if id(tensor) not in own:
                found[name.replace(".base_layer.", ".")] = tensor
        return found | {f"{name}.weight": partial(self._whole, layer) for name, layer in self._layers.items()}

    def _whole(self, layer: Any) -> Tensor:
        tensors = (layer.base_layer.weight, *_factors(layer))
        return self._merged(layer, *(parallel.whole(tensor.detach()) for tensor in tensors))

    @torch.no_grad()
    def merged_share(self) -> float:
        """Return the share of what is trained that `merged` does not round away; NaN before anything is. Collective.

        <r(W + D) - W, D> / <D, D>, summed over all adapted matrices, with D = alpha / rank * B A and r the rounding of published
        weights: 1 if all of it survives, 0 if every weight rounds back.
        """
        kept = whole = 0.0
        for layer in self._layers.values():
            weight, a, b = (parallel.whole(t.detach()) for t in (layer.base_layer.weight, *_factors(layer)))
            scale, transposed = layer.scaling[_NAME], layer.fan_in_fan_out
            added = _added(weight, a, b, scale, self.dtype, transposed=transposed)
            change = self._merged(layer, weight, a, b).to(added.dtype) - weight.to(added.dtype)
            kept += float((change * added).sum(dtype=torch.float64))
            whole += float((added * added).sum(dtype=torch.float64))
        return kept / whole if whole else math.nan

    def factors(self) -> State:
        """Return the trained weights alone, by peft's names. Collective where they are made whole."""
        return {
            f"base_model.model.{name.replace(f'.{_NAME}', '')}": weight
            for name, weight in self._model.named_parameters()
            if weight.requires_grad
        }

    def save(self, directory: Path, factors: Mapping[str, Tensor]) -> None:
        """Write adapters alone as peft reads them: `adapter_config.json` and `adapter_model.safetensors`.

        `factors`: whole, by peft's names.
        """
        self._config.save_pretrained(str(directory))
        tensors = {name: weight.to("cpu", self.dtype).contiguous() for name, weight in factors.items()}
        save_file(tensors, directory / FACTORS, {"format": "pt"})


def adapt(
    model: Any, settings: LoraSettings, path: Path, masters: torch.dtype, dtype: torch.dtype
) -> Adapters:
    """Freeze a model's weights and add adapters to the chosen layers, on the meta device and in precision `masters`.

    `path`: the model's checkpoint. Raise ConfigError if a target does not exist, or is not a matrix of its own.
    """
    _check_names(model, settings)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=_linear(model) if settings.targets == "all-linear" else [*settings.targets],
        exclude_modules=rf"(.*\.)?({'|'.join(towers)})\..*" if (towers := vision.towers(model)) else None,
        task_type="CAUSAL_LM",
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        base_model_name_or_path=str(path),
    )
    tied = {id(weight) for weight in _tied(model)}
    try:
        # Not the model itself: of one that peft knows, it would adapt experts in one tensor under their former names.
        inject_adapter_in_model(config, nn.ModuleDict({"model": model}), _NAME, low_cpu_mem_usage=True)
    except ValueError as error:
        raise _refused(settings, str(error).splitlines()[0]) from error
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        if base is None:
            continue
        if not isinstance(module, Linear) or id(base.weight) in tied:
            raise _refused(settings, f"{name} has no weight matrix of its own")
        for factor in (module.lora_A, module.lora_B):
            factor.to(masters)
    return Adapters(model, config, dtype)


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
    shape (in, out).
    """
    added = _added(weight, a, b, scale, dtype, transposed=transposed)
    return (weight.to(added.dtype) + added).to(torch.promote_types(weight.dtype, dtype))


def _added(
    weight: Tensor, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype, *, transposed: bool
) -> Tensor:
    """Return what `merged` adds to the weight, in its shape, in float32 at least."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    delta = scale * (b.to(dtype).to(wide) @ a.to(dtype).to(wide))
    return delta.T if transposed else delta


def _factors(layer: Any) -> tuple[Tensor, Tensor]:
    """Return A and B."""
    return layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight


def _adaptable(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Return the modules by name, without those that text alone never passes."""
    without = {module for part in vision.towers(model).values() for module in part.modules()}
    return ((name, module) for name, module in model.named_modules() if module not in without)


def _linear(model: Any) -> list[str]:
    """Return the last names of all linear layers but the output head."""
    head = model.get_output_embeddings()
    return sorted(
        {
            name.rpartition(".")[2]
            for name, module in _adaptable(model)
            if isinstance(module, nn.Linear | Conv1D) and module is not head
        }
    )


def _check_names(model: Any, settings: LoraSettings) -> None:
    """Raise ConfigError for a target that no module has: peft leaves it out silently if another one exists."""
    if settings.targets == "all-linear":
        return
    names = [name for name, _ in _adaptable(model)]
    missing = [
        each for each in settings.targets if not any(f".{name}".endswith(f".{each}") for name in names)
    ]
    if missing:
        existing = f"the linear layers are {', '.join(_linear(model))}"
        raise _refused(settings, f"the model has no layer {' and no layer '.join(missing)}; {existing}")


def _tied(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights that several modules have."""
    count: dict[int, int] = {}
    weights = [weight for _, weight in model.named_parameters(remove_duplicate=False)]
    for weight in weights:
        count[id(weight)] = count.get(id(weight), 0) + 1
    return [weight for weight in weights if count[id(weight)] > 1]


def _refused(settings: LoraSettings, why: str) -> ConfigError:
    return ConfigError(
        f'[model.lora] targets = {[*settings.targets]}: {why}; name linear layers, or use "all-linear"'
    )
