"""An engine that samples from the model that it is given, on the CPU: what vLLM does, slower, and started immediately."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gateway.engines.fake import FakeEngine, Faults
from gateway.engines.fake.sampling import Fingerprint
from trainer.model import pretrained as model


class ModelEngine(FakeEngine):
    """Behind the fake engine's API, with its faults. It knows a temperature, and no other setting of sampling.

    Few requests are sampled concurrently, so that the event loop has its turn.
    """

    def __init__(self, weights: str) -> None:
        self._models: dict[str, Any] = {}
        """The model of each identity: the weights', and those of adapters."""
        super().__init__(weights, Faults(slots=8))
        self._base = weights

    def _install(self, weights: str) -> None:
        super()._install(weights)
        self._models[self.weights_id] = model.load(Path(weights))

    async def load_adapter(self, name: str, path: str) -> None:
        from peft import PeftModel

        await super().load_adapter(name, path)
        self._models[self.adapters[name][0]] = PeftModel.from_pretrained(model.load(Path(self._base)), path)

    @torch.inference_mode()
    def _logits(self, weights_id: str, ids: Sequence[int]) -> Tensor:
        return self._models[weights_id](input_ids=torch.tensor([ids])).logits[0]

    def _next(
        self,
        context: Sequence[int],
        seen: Fingerprint,
        params: dict[str, Any],
        weights_id: str,
        block: object,
    ) -> tuple[int, float]:
        last, temperature = self._logits(weights_id, context)[-1], params["temperature"]
        if temperature == 0:
            return int(last.argmax()), 0.0
        logprobs = (last / temperature).log_softmax(-1)
        token = int(torch.multinomial(logprobs.exp(), 1))
        return token, float(logprobs[token])

    async def score(self, ids: Sequence[int], adapter: str | None = None) -> list[dict[str, Any] | None]:
        logprobs = self._logits(self._weights_of(adapter)[0], ids).log_softmax(-1)
        rows = [
            {str(token): {"logprob": float(row[token]), "rank": 1}}
            for row, token in zip(logprobs, ids[1:], strict=False)
        ]
        return [None, *rows]
