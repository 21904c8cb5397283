"""The parameters that engines use for those that are requested; acceptance tests hold the rule for vLLM against vLLM."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.v1.sampling import nth_seed
from gateway.engines.process import _ADAPTERS
from gateway.engines.used import used
from headgate.types import Sampling, TokenFlag


@pytest.mark.parametrize(
    ("api", "requested", "expected"),
    [
        ("vllm", {"temperature": 1e-50}, {"temperature": 0.01}),
        ("vllm", {"temperature": 0.0099}, {"temperature": 0.01}),
        ("vllm", {"temperature": 0.011, "seed": 0}, {"temperature": 0.011, "seed": 0}),
        ("vllm", {"seed": -1}, {"seed": None}),
        ("vllm", {"temperature": 0.7, "top_k": 1}, {"temperature": 0.7, "top_k": 1}),
        ("vllm", {"temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1}, {"temperature": 0.0}),
        ("sglang", {"temperature": 9e-7, "top_p": 0.5}, {"temperature": 0.0}),
        ("sglang", {"temperature": 1e-6, "seed": -1}, {"temperature": 1e-6, "seed": -1}),
        ("sglang", {"temperature": 0.7, "top_k": 1}, {"temperature": 0.0}),
        ("sglang", {"temperature": 0.7, "top_k": 2}, {"temperature": 0.7, "top_k": 2}),
    ],
)
def test_what_each_engine_uses(api: str, requested: dict[str, Any], expected: dict[str, Any]) -> None:
    assert used(api, Sampling(**requested)) == Sampling(**expected)


@pytest.mark.parametrize("api", _ADAPTERS)
@given(temperature=st.floats(0.0, 2.0))
def test_temperature_0_always_has_the_greedy_flag(api: str, temperature: float) -> None:
    found = used(api, Sampling(temperature=temperature))
    assert used(api, found) == found
    normal = np.float32(found.temperature) >= np.finfo(np.float32).tiny
    assert normal != bool(found.flags() & TokenFlag.GREEDY)


@pytest.mark.parametrize("first", [-3, -2, 0, 7, -(2**63), 2**63 - 2])
def test_replies_to_one_prompt_have_seeds_of_their_own(first: int) -> None:
    """-1 is vLLM's word for no seed, and its GPU workers keep seeds in int64."""
    seeds = [nth_seed(first, n) for n in range(5)]
    assert seeds[0] == first
    assert len({*seeds}) == 5
    assert -1 not in seeds
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
