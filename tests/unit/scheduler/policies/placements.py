"""Calls and costs for the tests of placement."""

from __future__ import annotations

from scheduler.policies.placement import Choice
from scheduler.policies.throughput import EngineModel
from scheduler.policies.waterfall import Waterfall
from scheduler.program.calls import Arrived

MODEL = EngineModel(s_per_kv_token=0.0, s_per_batch=1.0, s_per_call=0.5, s_per_step=1.0)


GAIN = Choice("gain", min_gain_share=0.3, late_call_weight=1.0)


def poured(fall: Waterfall, *requests: Arrived) -> dict[str, str]:
    for request in requests:
        fall.add(request)
    return {request.call: engine for request, engine in fall.place()}


def calls(count: int, version: int = 0) -> list[Arrived]:
    return [Arrived(f"v{version}-{i}", version, 10) for i in range(count)]
