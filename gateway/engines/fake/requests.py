"""The requests that run in the fake engine, and their output in vLLM's form."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from gateway.engines.fake.routes import as_npy


@dataclass(slots=True)
class RunningRequest:
    """A running request."""

    context: list[int] = field(default_factory=list)
    aborted: bool = False
    waits: bool = False
    """True while the request stands at the barrier and its last token was taken."""
    sampled: int = 0
    routes_from: int = 0
    routes: list[list[list[int]]] = field(default_factory=list)
    """The experts of each position from `routes_from` on that was computed."""
    labels: list[list[Any]] = field(default_factory=list)
    """[[label, number of tokens], ...]"""

    def count(self, label: str) -> None:
        self.sampled += 1
        if self.labels and self.labels[-1][0] == label:
            self.labels[-1][1] += 1
        else:
            self.labels.append([label, 1])


def choice_of(
    ids: list[int], logprobs: list[float], finish: str | None, request: RunningRequest
) -> dict[str, Any]:
    """Return tokens as a choice in vLLM's form; the last one has the versions and the experts of all."""
    content = [
        {"token_id": token, "logprob": value, "rank": 1} for token, value in zip(ids, logprobs, strict=True)
    ]
    return {
        "index": 0,
        "token_ids": ids,
        "logprobs": {"content": content},
        "finish_reason": finish,
        "weight_versions": _spans(request) if finish else None,
        **({"routed_experts": as_npy(request.routes)} if finish and request.routes else {}),
    }


def _spans(request: RunningRequest) -> list[dict[str, Any]]:
    ends = list(accumulate(count for _, count in request.labels))
    labels = [label for label, _ in request.labels]
    return [
        {"version": label, "start": start, "end": end}
        for label, start, end in zip(labels, [0, *ends], ends, strict=False)
    ]
