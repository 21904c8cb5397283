"""vLLM's worker extension: `--worker-extension-cls headgate_transfer.vllm_worker.ProvingWorker`.

`/collective_rpc` calls its methods in each worker. They compare what the worker holds with what was published (`proof`), or
report its device, and change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from . import devices
from .proof import Block, Places, QuantizedBlock, compare_adapter, rows_of

_CONFIG = "adapter_config.json"
_UNPACK_ROWS = 1024
"""Rows of the identity by which a packed matrix is multiplied in one piece."""


class ProvingWorker:
    """One worker's side. vLLM makes it a base of its worker, so all names begin with `headgate`."""

    headgate_places: Places | None = None

    @torch.inference_mode()
    def headgate_prove(self, version: int, path: str) -> dict[str, Any]:
        """Compare the model in memory with a version: the one that a transfer brought last, else the checkpoint in `path`."""
        if self.headgate_places is None:
            parallel: Any = self.parallel_config  # type: ignore[attr-defined]
            size = parallel.tensor_parallel_size
            self.headgate_places = Places(self.rank % size, size)  # type: ignore[attr-defined]
        model: nn.Module = self.model_runner.get_model()  # type: ignore[attr-defined]
        transfer = self.weight_transfer_engine  # type: ignore[attr-defined]
        received, tensors = getattr(transfer, "taken", None), _stored(Path(path))
        if received is not None and received.version == version:
            transfer.taken = None
            tensors = ((name, tensor.cpu()) for name, tensor in received.tensors())
        blocks, stale = _memory(model, self.model_config.dtype)  # type: ignore[attr-defined]
        result = self.headgate_places.compare(blocks, tensors)
        result.wrong |= stale
        return result.to_json()

    def headgate_device(self) -> dict[str, str]:
        """Return the worker's accelerator and shared memory."""
        return devices.own()

    @torch.inference_mode()
    def headgate_prove_adapter(self, path: str) -> dict[str, Any]:
        """Compare the adapters in memory with the one in `path`; the result is that of the adapter which is nearest."""
        manager = self.model_runner.lora_manager._adapter_manager  # type: ignore[attr-defined]
        folder = Path(path)
        tensors, config = dict(_stored(folder)), json.loads((folder / _CONFIG).read_bytes())
        scaling = config["lora_alpha"] / config["r"]
        loaded = [_factors(lora, manager.packed_modules_mapping) for lora in manager.list_adapters().values()]
        results = [compare_adapter(factors, tensors, scaling) for factors in loaded or [{}]]
        return min(results, key=lambda result: len(result.wrong)).to_json()


def _stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the files that the version's folder has, by name."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                yield name, stored.get_tensor(name)


def _memory(model: nn.Module, dtype: torch.dtype) -> tuple[dict[str, Tensor | Block], dict[str, str]]:
    """Return the blocks of numbers that a model computes with, by name, and the packed copies that differ from theirs.

    `dtype`: in which numbers are loaded, before those of quantized layers are rounded.

    vLLM's CPU build packs matrices, and mostly empties the original; a product with the identity unpacks them.
    """
    blocks, stale = dict[str, Tensor | Block](), dict[str, str]()
    pointers = set[int]()
    for path, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.numel() and tensor.data_ptr() not in pointers:
                pointers.add(tensor.data_ptr())
                blocks[f"{path}.{key}"] = _block(module, key, tensor, dtype)
        if "cpu_linear" in vars(module) and (packed := unpacked(module)) is not None:
            if not module.weight.numel():
                blocks[f"{path}.weight"] = packed
            elif not torch.equal(module.weight, packed):
                stale[f"{path}.weight"] = "the packed copy that the engine computes with was not loaded again"
    return blocks, stale


def _block(module: nn.Module, key: str, tensor: Tensor, dtype: torch.dtype) -> Tensor | Block:
    """Return a block of rows (out, in), with the scales by which vLLM's online quantization rounded them, if it did."""
    scale = getattr(module, f"{key}_scale", None)
    if tensor.dtype != torch.float8_e4m3fn or not isinstance(scale, Tensor):
        return tensor
    rows = rows_of(tensor.t() if tensor.ndim == 2 else tensor)  # the kernels of matrices take (in, out)
    if scale.numel() not in (1, len(rows)):
        return tensor
    return QuantizedBlock(rows, scale.reshape(-1, 1), dtype)


def unpacked(module: Any) -> Tensor | None:
    """Return the matrix (out, in) by which a module multiplies, or None if its width is not known."""
    weight: Tensor = module.weight
    width = weight.shape[-1] if weight.ndim == 2 else getattr(module, "input_size_per_partition", None)
    if width is None or weight.ndim > 2:
        return None
    parts = []
    for start in range(0, width, _UNPACK_ROWS):
        rows = torch.eye(min(_UNPACK_ROWS, width - start), dtype=weight.dtype)
        rows = nn.functional.pad(rows, (start, width - start - len(rows)))
        parts.append(module.cpu_linear(rows, weight, None).to(weight.dtype))
    return torch.cat(parts).t().contiguous()


def _factors(lora: Any, packed: dict[str, list[str]]) -> dict[str, Tensor]:
    """Return the factors of one of vLLM's adapters, by the names of the matrices in the checkpoint."""
    found: dict[str, Tensor] = {}
    for name, layer in lora.loras.items():
        parent, _, last = name.rpartition(".")
        for kind, factor in (("lora_A", layer.lora_a), ("lora_B", layer.lora_b)):
            merged = isinstance(factor, list)
            names = packed.get(last, [last]) if merged else [last]
            for part, tensor in zip(names, factor if merged else [factor], strict=False):
                if tensor is not None:
                    found[f"{parent}.{part}.{kind}.weight"] = tensor
    return found
