"""The optimizer of a model, and its learning rate as a function of the step.

AdamW alone is one `torch.optim.Optimizer` (with moments in bfloat16: `rounded_adamw`); with Muon there are two, which `Optimizer`
steps as one. Offloaded, each weight has one of its own, so that the moments of one weight at a time are on the device, and
its gradient, if gradients are offloaded too (`host_gradients`).
Invariants: settings of today act, whatever the state was made with, for the state holds moments alone; a step is the same bit by
bit with and without offload.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config.optimizer import OptimizerSettings
from trainer.model import parallel, rounded_adamw
from trainer.model.host_gradients import HostGradients
from trainer.model.rounded_adamw import RoundedAdamW

Moments = dict[str, dict[str, Tensor]]
"""An optimizer's tensors (`step`, `exp_avg`, ...) by the name of the weight and their own."""


class Optimizer:
    """One step over all the weights of a model."""

    def __init__(
        self,
        model: nn.Module,
        parts: Iterable[torch.optim.Optimizer],
        *,
        offload: bool = False,
        gradients: HostGradients | None = None,
    ) -> None:
        """`offload`: moments are in the host's memory between the steps of `parts`; `gradients`: so are these."""
        self.parts = tuple(parts)
        self._model = model
        self._offload = offload
        self._gradients = gradients

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The options, with the weights that they are for."""
        return [group for part in self.parts for group in part.param_groups]

    def divide_and_clip(self, divisor: float, largest: float) -> float:
        """Divide the gradients, cut their norm to `largest`, and return the norm before the cut. Collective."""
        if self._gradients is None:
            return parallel.divide_and_clip(self._model, divisor, largest)
        return self._gradients.divide_and_clip(divisor, largest)

    def step(self) -> None:
        """Change the weights by their gradients."""
        for part in self.parts:
            weights = [weight for group in part.param_groups for weight in group["params"]]
            gradients = nullcontext() if self._gradients is None else self._gradients.at_hand(weights)
            with gradients, self._at_hand(part):
                part.step()

    @contextmanager
    def _at_hand(self, part: torch.optim.Optimizer) -> Iterator[None]:
        """Hold a part's moments where its weights are."""
        if not self._offload:
            yield
            return
        for weight, entry in part.state.items():
            part.state[weight] = _copied(entry, weight.device)
        yield
        for weight, entry in part.state.items():
            part.state[weight] = _copied(entry, "cpu")

    def zero_grad(self) -> None:
        """Discard the gradients."""
        for part in self.parts:
            part.zero_grad()
        if self._gradients is not None:
            self._gradients.clear()

    def moments(self) -> Moments:
        """Return the state of the optimizer by parameter; empty before the first step."""
        return {
            name: {key: value for key, value in part.state[weight].items() if isinstance(value, Tensor)}
            for name, part, weight in self._weights()
            if weight in part.state
        }

    def set_moments(self, moments: Moments) -> None:
        """Replace the moments; the optimizer owns the given ones from then on."""
        for name, part, weight in self._weights():
            part.state.pop(weight, None)
            if name in moments:
                part.state[weight] = dict(moments[name])

    def empty_moments(self) -> Moments:
        """Return zero moments of the kinds and shapes that a first step makes, into which a checkpoint is read."""
        found: Moments = {}
        for name, part, weight in self._weights():
            found[name] = _empty(part, weight)
            if self._offload:
                found[name] = _copied(found[name], "cpu")
        return found

    def _weights(self) -> Iterator[tuple[str, torch.optim.Optimizer, nn.Parameter]]:
        of = {
            weight: part for part in self.parts for group in part.param_groups for weight in group["params"]
        }
        for name, weight in self._model.named_parameters():
            if weight in of:
                yield name, of[weight], weight


def _empty(part: torch.optim.Optimizer, weight: Tensor) -> dict[str, Tensor]:
    if isinstance(part, torch.optim.Muon):
        return {"momentum_buffer": torch.zeros_like(weight.detach())}
    if isinstance(part, RoundedAdamW):
        return rounded_adamw.empty(weight)
    # A fused AdamW counts its steps where the weights are.
    counter = torch.zeros((), device=weight.device if weight.is_cuda else "cpu")
    averages = {key: torch.zeros_like(weight.detach()) for key in ("exp_avg", "exp_avg_sq")}
    return {"step": counter, **averages}


def _copied(entry: Mapping[str, Any], device: torch.device | str) -> dict[str, Any]:
    """Return a copy of one weight's moments on a device; shards stay shards."""
    return {
        key: value.to(device, copy=True) if isinstance(value, Tensor) else value
        for key, value in entry.items()
    }


def create(model: nn.Module, settings: OptimizerSettings) -> Optimizer:
    """Return the optimizer of those weights of `model` that are trained."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    inner = muon_weights(model) if settings.type == "muon" else []
    chosen = set(inner)
    outer = [weight for weight in weights if weight not in chosen]
    numbers = {weight: number for number, weight in enumerate(outer)}
    parts = [_muon(some, settings) for some in _cut(inner, settings)]
    parts += [_adamw([(numbers[each], each) for each in some], settings) for some in _cut(outer, settings)]
    gradients = HostGradients(weights) if settings.offload_gradients else None
    return Optimizer(model, parts, offload=settings.offload == "host", gradients=gradients)


def _cut(weights: list[nn.Parameter], settings: OptimizerSettings) -> list[list[nn.Parameter]]:
    """Return the weights that are stepped together."""
    if settings.offload == "host":
        return [[weight] for weight in weights]
    return [weights] if weights else []


def muon_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained weights that Muon is for: matrices other than embeddings and the output head."""
    outer = _embeddings(model)
    return [
        weight
        for weight in model.parameters()
        if weight.requires_grad and weight.ndim == 2 and weight not in outer
    ]


def _muon(weights: list[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    return torch.optim.Muon(
        weights,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )


def _adamw(weights: list[tuple[int, nn.Parameter]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    options: dict[str, Any] = settings.model_dump(include={"lr", "betas", "eps", "weight_decay"})
    if settings.moments == "bfloat16":
        return RoundedAdamW(weights, **options)
    return torch.optim.AdamW([weight for _, weight in weights], **options, fused=True)


def _embeddings(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights of the input and output embeddings, which Muon is not for."""
    tables = {
        weight
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for weight in module.parameters()
    }
    output = getattr(model, "get_output_embeddings", lambda: None)()
    return tables | set(output.parameters() if output is not None else ())


def lr_at(step: int, settings: OptimizerSettings, total_steps: int) -> float:
    """Return the learning rate of a step, counted from 0, of a run of `total_steps`.

    It rises evenly over the warm-up, and then stays or falls; at and after `total_steps` it has its final value.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    rest = max(1, total_steps - settings.warmup_steps)
    progress = min(1.0, (step - settings.warmup_steps) / rest)
    left = 1.0 - progress if settings.schedule == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    return settings.lr * (settings.final_lr_share + (1.0 - settings.final_lr_share) * left)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
