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
        """Flip the lowest bit of one number of a matrix that vLLM has packed."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        random, layer = Random(seed), self._packed(seed)
        weight = unpacked(layer)
        assert weight is not None
        bits = weight.view({2: torch.int16, 4: torch.int32}[weight.itemsize])
        bits[random.randrange(len(bits)), random.randrange(bits.shape[1])] ^= 1
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
        layer = self._packed(seed)
        shape = layer.input_size_per_partition, layer.output_size_per_partition
        other = next(
            one for one in self._all_packed()
            if one is not layer and (one.input_size_per_partition, one.output_size_per_partition) == shape
        )  # fmt: skip
        layer.cpu_linear, other.cpu_linear = other.cpu_linear, layer.cpu_linear

    def damage_adapters(self, _seed: int) -> None:
        """Lose every adapter."""
        for number in list(self.list_loras()):  # type: ignore[attr-defined]
            self.remove_lora(number)  # type: ignore[attr-defined]

    def _packed(self, seed: int) -> Any:
        found = self._all_packed()
        return found[seed % len(found)]

    def _all_packed(self) -> list[Any]:
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        return [one for one in model.modules() if "cpu_linear" in vars(one) and not one.weight.numel()]
