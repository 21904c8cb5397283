"""Computes the memory of a model's weights and passes without making them: on the meta device, tensors have shapes and no
memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface

from headgate.routes import router_shape
from trainer.config.model import ModelSettings
from trainer.data.packing import MicroBatch
from trainer.errors import ConfigError
from trainer.memory_plan import Shapes, Weights
from trainer.model import activations, expert_parallel, loading, optim, rope, vision
from trainer.model.policy import Policy

_NAME = "headgate_shapes"


def measure(
    wanted: ModelSettings,
    tokens: int,
    dtype: torch.dtype,
    *,
    entropy_grad: bool = False,
    expert_ranks: int = 1,
) -> Shapes:
    """Return the shapes of a model, from its `config.json`, and of a pass over `tokens` trained tokens.

    `dtype` is the precision of the pass. Raise ConfigError if the architecture does not run without values, or if `expert_ranks`
    cannot share its experts.
    """
    model = loading.empty(wanted.path, dtype)
    experts = expert_parallel.modules_of(model, expert_ranks) if expert_ranks > 1 else []
    rope.pin(model, wanted.max_model_len)
    vision.freeze(model, wanted.vision)
    if wanted.lora is not None:
        # Seconds to import, for runs with adapters alone.
        from trainer.model import lora

        lora.adapt(model, wanted.lora, wanted.path, dtype, dtype)
    policy = Policy(model)
    live = Live(policy.parameters())
    keep = live.host if wanted.activation_offload else nullcontext
    activations.checkpoint_layers(policy.layers, wanted.activation_checkpointing, keep)
    try:
        peaks = _pass(policy, live, tokens, entropy_grad)
    except (NotImplementedError, RuntimeError, ValueError, TypeError) as error:
        name, why = type(policy.model).__name__, str(error).strip().splitlines()[0]
        raise ConfigError(f"[model] path: {name} does not run on the meta device: {why}") from error
    largest = max(policy.layers, key=lambda layer: _count(layer.parameters()).all, default=nn.Module())
    shared = [weight for module in largest.modules() if module in experts for weight in module.parameters()]
    inner = {id(weight) for layer in policy.layers for weight in layer.parameters()}
    trained = [weight for weight in policy.parameters() if weight.requires_grad]
    return Shapes(
        weights=_count(policy.parameters()),
        layer=_count(largest.parameters()),
        experts=_count(shared),
        outer=_count([weight for weight in policy.parameters() if id(weight) not in inner]),
        matrices=sum(weight.numel() for weight in optim.muon_weights(policy.model)),
        largest=max(weight.numel() for weight in trained),
        kept=peaks["kept"],
        kept_on_host=live.on_host,
        head=peaks["head"] - peaks["kept"],
        layers=max(peaks["decode"], peaks["backward"]) - peaks["kept"],
        routed=_routed(model, tokens, dtype) if experts else 0,
    )


def _routed(model: Any, tokens: int, dtype: torch.dtype) -> int:
    shape = router_shape(model.config.to_dict())
    top_k = 0 if shape is None else shape.top_k
    return int(tokens * top_k * model.config.get_text_config().hidden_size * dtype.itemsize)


def _count(weights: Iterable[nn.Parameter]) -> Weights:
    """Count weights, each once."""
    unique = {id(weight): weight for weight in weights}.values()
    trained = sum(weight.numel() for weight in unique if weight.requires_grad)
    return Weights(trained, sum(weight.numel() for weight in unique) - trained)


def _pass(policy: Policy, live: Live, tokens: int, entropy_grad: bool) -> dict[str, int]:
    """Return the bytes that live at the end of the decoder, and the most of them in each part of a pass."""
    AttentionInterface.register(_NAME, _attention)
    policy.model.set_attn_implementation(_NAME)
    found: dict[str, int] = {}

    def end_head(_: Tensor) -> None:
        found["head"] = live.restart()

    def decoded(_: nn.Module, __: Any, result: Any) -> None:
        found["decode"], found["kept"] = live.restart(), live.now
        if result.last_hidden_state.requires_grad:  # not where adapters of the head alone are trained
            result.last_hidden_state.register_hook(end_head)

    def drop(weight: Tensor) -> None:
        weight.grad = None

    hooks = [
        weight.register_post_accumulate_grad_hook(drop)
        for weight in policy.parameters()
        if weight.requires_grad
    ]
    hooks.append(policy.model.get_decoder().register_forward_hook(decoded))
    with live:
        policy(_micro_batch(tokens), entropy_grad=entropy_grad)[0].sum().backward()
    for hook in hooks:
        hook.remove()
    if "head" not in found:
        found["head"] = live.restart()
    return found | {"backward": live.restart()}


def _micro_batch(tokens: int) -> MicroBatch:
    """Return one row on the meta device, of which all tokens but the first are trained."""
    ids = torch.zeros(tokens, dtype=torch.int64, device="meta")
    whole, real = ids[1:], torch.zeros(tokens - 1, device="meta")
    figures = dict.fromkeys(("recorded", "temperature", "advantages", "weights"), real)
    numbers = dict.fromkeys(("at", "context", "versions", "sequences", "nodes"), whole)
    return MicroBatch(
        ids=ids, positions=ids, ends=ids, **figures, **numbers, episodes=("",), images=(), passes=1
    )


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that were made under it and are still there, and the most there were at a time."""

    def __init__(self, known: Iterator[Tensor]) -> None:
        """`known`: tensors that do not count."""
        super().__init__()
        self.now = 0
        self.on_host = 0
        """Bytes of what autograd kept within `host`."""
        self._peak = 0
        self._counted = {tensor.untyped_storage()._cdata for tensor in known}

    def restart(self) -> int:
        """Return the most bytes since the last time."""
        peak, self._peak = self._peak, self.now
        return peak

    def host(self) -> AbstractContextManager[Any]:
        """Count autograd's tensors as moved off the device until the backward pass."""

        def pack(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
            self.on_host += tensor.nbytes
            return tensor.shape, tensor.stride(), tensor.dtype

        def unpack(packed: tuple[torch.Size, tuple[int, ...], torch.dtype]) -> Tensor:
            shape, stride, dtype = packed
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

        return saved_tensors_hooks(pack, unpack)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, Tensor):
                self._see(each.untyped_storage())
        return found

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._counted:
            return
        self._counted.add(key)
        self.now += size
        self._peak = max(self._peak, self.now)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.now -= size


class _Kernel(torch.autograd.Function):
    """Attention by its shapes alone, as FlashAttention and FlexAttention keep them."""

    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found = query.new_empty((*query.shape[:3], value.shape[3]))
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        context.save_for_backward(query, key, value, found, sums)
        return found

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, sums = context.saved_tensors
        # Kernels have one more number for each query and head while they make the gradients.
        _ = torch.empty_like(sums)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    found: Tensor = _Kernel.apply(query, key, value)
    return found.transpose(1, 2).contiguous(), None


class GroupedShapes(TorchDispatchMode):
    """Within the block, `grouped_mm` of tensors without memory has the shapes of real ones in every precision.

    PyTorch 2.13 refuses all but bfloat16 there ("Expected inputs of BF16 type").
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._grouped_mm.default and args[0].is_meta:
            left, right, *rest = args
            ends = rest[0] if rest else (kwargs or {}).get("offs")
            # (rows, in) by (groups, in, out), or for a gradient (in, rows) by (rows, out), whose groups `ends` counts.
            groups = () if left.ndim + right.ndim > 4 or ends is None else (ends.shape[0],)
            return left.new_empty(*groups, *left.shape[:-1], right.shape[-1])
        return function(*args, **(kwargs or {}))
