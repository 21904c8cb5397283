"""What `[model.lora] targets` names in a model: linear layers, which peft adapts, and tensors of experts. Owns no state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from trainer.config.model import LoraSettings
from trainer.errors import ConfigError
from trainer.model import expert_lora, expert_parallel, vision


def _adaptable(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Return the modules by name, without those that text alone never passes."""
    without = {module for part in vision.towers(model).values() for module in part.modules()}
    return ((name, module) for name, module in model.named_modules() if module not in without)


def linear(model: Any) -> list[str]:
    """Return the last names of all linear layers but the output head."""
    head = model.get_output_embeddings()
    return sorted(
        {
            name.rpartition(".")[2]
            for name, module in _adaptable(model)
            if isinstance(module, nn.Linear | Conv1D) and module is not head
        }
    )


def of_layers(model: Any, targets: Sequence[str]) -> list[str]:
    """Return the targets that name layers; others name tensors of experts."""
    names = [name for name, _ in _adaptable(model)]
    return [each for each in targets if any(_ends_with(name, each) for name in names)]


def chosen_experts(model: Any, settings: LoraSettings) -> dict[str, list[str]]:
    """Return the tensors of experts that targets name, by their module.

    Raise ConfigError for those whose product is not known, and for a target that nothing has: peft leaves it out silently if
    another one exists.
    """
    if settings.targets == "all-linear":
        return {}
    tensors = expert_lora.tensors_of(_adaptable(model))
    layers = of_layers(model, settings.targets)
    every = {f"{name}.{key}" for name, keys in tensors.items() for key in keys}
    missing = [
        each
        for each in settings.targets
        if each not in layers and not any(_ends_with(name, each) for name in every)
    ]
    if missing:
        existing = f"the linear layers are {', '.join(linear(model))}"
        if every:
            existing += f", and the tensors of experts {', '.join(sorted({key for keys in tensors.values() for key in keys}))}"
        raise refused(settings, f"the model has no layer {' and no layer '.join(missing)}; {existing}")
    found: dict[str, list[str]] = {}
    for name, keys in tensors.items():
        own = [key for key in keys if any(_ends_with(f"{name}.{key}", each) for each in settings.targets)]
        if own and not expert_parallel.has_parts(model.get_submodule(name)):
            raise refused(settings, f"how {name} computes is not known, so its tensors get no adapters")
        found |= {name: own} if own else {}
    return found


def _ends_with(name: str, target: str) -> bool:
    """Return true if a target names this layer or tensor, by peft's rule."""
    return f".{name}".endswith(f".{target}")


def refused(settings: LoraSettings, why: str) -> ConfigError:
    return ConfigError(
        f'[model.lora] targets = {[*settings.targets]}: {why}; name linear layers or tensors of experts, or use "all-linear"'
    )
