"""Real vLLM whose memory a test can damage: `--worker-extension-cls tests.harness.vllm_damage.DamagedWorker`."""

from __future__ import annotations

from random import Random
from typing import Any

import torch

from headgate.weights.plugin.headgate_transfer.vllm_worker import ProvingWorker, unpacked


class DamagedWorker(ProvingWorker):
    """The worker that headgate starts, and what can go wrong in its memory."""

    @torch.inference_mode()
    def damage_one_bit(self, seed: int) -> None:
        """Flip the lowest bit of one number of a matrix, which vLLM has packed if the processor can compute with packed ones."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        random, layer = Random(seed), self._matrix(seed)
        is_packed = not layer.weight.numel()
        weight = unpacked(layer) if is_packed else layer.weight.data
        assert weight is not None
        bits = weight.view({2: torch.int16, 4: torch.int32}[weight.itemsize])
        bits[random.randrange(len(bits)), random.randrange(bits.shape[1])] ^= 1
        if not is_packed:
            return
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=True)

    @torch.inference_mode()
    def damage_quantized(self, seed: int) -> None:
        """Flip the lowest bit of one code of a matrix that vLLM has quantized."""
        model, random = self.model_runner.get_model(), Random(seed)  # type: ignore[attr-defined]
        found = [one.weight for one in model.modules() if hasattr(one, "weight_scale")]
        codes = found[seed % len(found)].view(torch.uint8)
        codes[random.randrange(len(codes)), random.randrange(codes.shape[1])] ^= 1

    def damage_swapped(self, seed: int) -> None:
        """Swap a matrix with the one of the same name in another layer."""
        layer = self._matrix(seed)
        shape = layer.input_size_per_partition, layer.output_size_per_partition
        other = next(
            one for one in self._matrices()
            if one is not layer and (one.input_size_per_partition, one.output_size_per_partition) == shape
        )  # fmt: skip
        layer.cpu_linear, other.cpu_linear = other.cpu_linear, layer.cpu_linear
        layer.weight, other.weight = other.weight, layer.weight

    def damage_adapters(self, _seed: int) -> None:
        """Lose every adapter."""
        for number in list(self.list_loras()):  # type: ignore[attr-defined]
            self.remove_lora(number)  # type: ignore[attr-defined]

    def _matrix(self, seed: int) -> Any:
        found = self._matrices()
        return found[seed % len(found)]

    def _matrices(self) -> list[Any]:
        """Return the layers of linear maps; where some are packed, those."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        found = [
            one for one in model.modules() if {"cpu_linear", "input_size_per_partition"} <= vars(one).keys()
        ]
        return [one for one in found if not one.weight.numel()] or found
