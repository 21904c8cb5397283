"""The policy that is trained, and the one that it is compared with, as `[model]` describes them. Owns no state."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import noop_context_fn

from trainer.config.model import ModelSettings
from trainer.data.packing import MicroBatch
from trainer.errors import ConfigError
from trainer.model import (
    activations,
    compiled,
    loading,
    parallel,
    pretrained,
    recurrent,
    rope,
    router_replay,
    start_check,
    vision,
)
from trainer.model.parallel import Ranks
from trainer.model.policy import Policy
from trainer.model.vision import VisionInputs


class Reference(Protocol):
    """The initial weights, by their log-probabilities."""

    @property
    def shares_prefixes(self) -> bool:
        """True if it can compute a common prefix of rows once."""

    def logprobs(self, micro: MicroBatch) -> Tensor:
        """Return the log-probability of each trained token, without gradient."""


class Unadapted:
    """The initial weights within a policy whose adapters are trained."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    @property
    def shares_prefixes(self) -> bool:
        """True if it can compute a common prefix of rows once."""
        return self._policy.shares_prefixes

    def logprobs(self, micro: MicroBatch) -> Tensor:
        """Return the log-probability of each trained token, without gradient."""
        with self._policy.computing("initial"):
            return self._policy.logprobs(micro)


def trained(
    wanted: ModelSettings, ranks: Ranks, seed: int, vision_inputs: VisionInputs | None = None
) -> Policy:
    """Return the initial weights, once they agree with the model's own forward pass in float32, ready to be trained. Collective.

    All of them are trained, in float32, or adapters in addition to them; see also `[model] vision`. `seed`: of the adapters.
    `vision_inputs`: of a vision model. Raise ConfigError.
    """
    if vision_inputs is not None and wanted.attention != "rows":
        raise ConfigError(
            f"[model] path = {str(wanted.path)!r}: this model accepts images, whose positions have three dimensions, which only"
            ' its own attention supports: set [model] attention = "rows"; every path is then computed separately'
        )
    if wanted.attention_kernel == "flex" and not ranks.device.startswith("cuda"):
        raise ConfigError(
            '[model] attention_kernel = "flex": FlexAttention has no gradient on the CPU; set it to "auto"'
        )
    stored: pretrained.Dtype = "float32" if wanted.lora is None else wanted.dtype
    mixed = wanted.dtype != "float32"
    separate = mixed or wanted.lora is not None
    checked = _empty(
        wanted, ranks, stored, torch.float32 if mixed else None, vision_inputs, compiling=not separate
    )
    loading.fill(checked.model, wanted.path, ranks.device, ranks)
    vision.freeze(checked.model, wanted.vision)  # what is read in the place of a weight is trained
    if wanted.lora is not None:
        checked.requires_grad_(False)  # FSDP wants weights that are trained to be of one precision
    start_check.check(checked, wanted.max_model_len)
    if checked.replay is not None:
        start_check.check_replay(checked)
    if not separate:
        return checked
    compute = pretrained.DTYPES[wanted.dtype] if mixed else None
    policy = _empty(wanted, ranks, stored, compute, vision_inputs, adapted=True)
    parallel.move(checked, policy, policy.base_of)
    if policy.adapters is not None:
        policy.adapters.initialize(ranks.device, seed)
    return policy


def reference(wanted: ModelSettings, ranks: Ranks, policy: Policy) -> Reference:
    """Return the initial weights of a trained policy, in separate memory only if all of its weights change. Collective."""
    if policy.adapters is not None:
        return Unadapted(policy)
    compute = None if wanted.dtype == "float32" else pretrained.DTYPES[wanted.dtype]
    found = _empty(wanted, ranks, wanted.dtype, compute, policy.vision_inputs)
    loading.fill(found.model, wanted.path, ranks.device, ranks)
    found.requires_grad_(False)
    return found


def _empty(
    wanted: ModelSettings,
    ranks: Ranks,
    dtype: pretrained.Dtype,
    compute: torch.dtype | None,
    vision_inputs: VisionInputs | None,
    *,
    adapted: bool = False,
    compiling: bool = True,
) -> Policy:
    """Return a policy without its weights, spread over the ranks. `compiling`: compile its layers, if that is wanted."""
    model, adapters = loading.empty(wanted.path, pretrained.DTYPES[dtype]), None
    rope.pin(model, wanted.max_model_len)
    vision.freeze(model, wanted.vision)
    ranks.divide(model)
    if adapted and wanted.lora is not None:
        # Takes seconds to import, which only runs with adapters need.
        from trainer.model import lora

        masters, published = pretrained.DTYPES["float32"], pretrained.DTYPES[wanted.dtype]
        adapters = lora.adapt(model, wanted.lora, wanted.path, masters, published)
    experts = ranks.divide_experts(model)
    replay = router_replay.RouterReplay(model) if wanted.router_replay else None
    policy = Policy(
        model,
        wanted.attention,
        ranks.context_exchange,
        adapters,
        vision_inputs,
        replay,
        experts,
        wanted.attention_kernel,
    )
    has_states = bool(recurrent.layers_of(model))
    graphs = compiled.is_wanted(wanted, ranks.device, ranks.tensor, ranks.expert, has_states=has_states)
    if graphs and compiling:
        compiled.compile_layers(policy.layers)
    keep = activations.on_host if wanted.activation_offload else nullcontext
    contexts = noop_context_fn if replay is None else replay.contexts
    activations.checkpoint_layers(policy.layers, wanted.activation_checkpointing, keep, contexts)
    ranks.shard(policy, policy.layers, compute, passes=("plain",), experts=experts)
    return policy
