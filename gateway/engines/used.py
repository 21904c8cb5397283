"""The sampling parameters that an engine uses, for those that are requested. Pure; one rule per API.

Engines replace some parameters without a word. The gateway applies the rule before it sends and records a call, so that what is
recorded, what is sent and what samples are the same. Invariants: a rule is idempotent, and a temperature above 0 that it returns
is at least `LEAST_TEMPERATURE`, and so not 0 in the float32 of the feed.

What engines refuse with an error has no rule, nor has what they replace without an effect on a distribution (repeated stop
tokens, a `top_k` of the whole vocabulary or more, which stays flagged as truncated).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from headgate.types import LEAST_TEMPERATURE, Sampling

_VLLM_LEAST = 0.01
"""`_MAX_TEMP` in vLLM's `sampling_params.py`."""
_VLLM_NO_SEED = -1


def used(api: str, requested: Sampling) -> Sampling:
    """Return the parameters with which engines of an API sample a request.

    Raise KeyError for an API without a rule.
    """
    return _RULES[api](requested)


def _vllm(requested: Sampling) -> Sampling:
    """Return what `SamplingParams.__post_init__` of vLLM 0.32 makes of the parameters."""
    if requested.temperature >= _VLLM_LEAST and requested.seed != _VLLM_NO_SEED:
        return requested
    seed = None if requested.seed == _VLLM_NO_SEED else requested.seed
    if requested.temperature == 0.0:
        return replace(_greedy(requested), seed=seed)
    return replace(requested, temperature=max(requested.temperature, _VLLM_LEAST), seed=seed)


def _sglang(requested: Sampling) -> Sampling:
    """Return what `SamplingParams.__post_init__` of SGLang 0.5 makes of the parameters.

    It takes temperatures below 1e-6 as greedy. It also samples `top_k` 1 as greedy, and then its log-probabilities are those at
    temperature 1 or at the requested one, depending on the rest of the batch; sent as greedy they are always those at 1.
    """
    return (
        _greedy(requested) if requested.temperature < LEAST_TEMPERATURE or requested.top_k == 1 else requested
    )


def _greedy(requested: Sampling) -> Sampling:
    """Return parameters that take the likeliest token. What would leave out others has no effect then, so it is neutral."""
    return replace(requested, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)


_RULES: dict[str, Callable[[Sampling], Sampling]] = {"vllm": _vllm, "sglang": _sglang}
