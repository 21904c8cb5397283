"""The times of engines, trainers and transfers, computed from coefficients.toml by a roofline.

An engine of g GPUs holds P parameters in bf16. A decode step reads all weights (2P bytes) or does the arithmetic of its n
calls (2P flops each), whichever is longer; it reads the cache of every running call; and it has a fixed cost. So the four
coefficients of StaleFlow's model (arXiv 2601.12784) follow from the memory's bandwidth, the flops, and the shares of them that
are reached.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from lab.simulate.engine import EngineCosts
from lab.simulate.errors import ScenarioError
from scheduler.policies.throughput import EngineModel

COEFFICIENTS = Path(__file__).with_name("coefficients.toml")
_BYTES = 2
"""Bytes of a parameter or a cached number in bf16."""


@lru_cache
def coefficients() -> dict[str, Any]:
    """Return the contents of coefficients.toml."""
    return tomllib.loads(COEFFICIENTS.read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class TrainerCosts:
    """The times of a trainer."""

    token_s: float
    """GPU seconds for each trained token."""
    step_s: float
    """Seconds for each batch."""
    spread: float
    """The share that is lost with each doubling of the GPUs."""

    def seconds(self, tokens: float, gpus: int) -> float:
        """Return the seconds to train tokens on a number of GPUs, without the step at the end."""
        return tokens * self.token_s * (1 + self.spread * math.log2(gpus)) / gpus


@dataclass(frozen=True, slots=True)
class TransferCosts:
    """The seconds of weight transfers, and of a node's change of role."""

    push_s: float
    """The trainer's part: into the memory of the engines' hosts, from where engines fetch for themselves."""
    delay_s: float
    """Seconds from the end of a step until engines' hosts have its version, while neither waits."""
    pull_s: float
    """An engine's part."""
    to_train_s: float
    """A node with engines becomes the trainer's: weights and cache are dropped, the trainer's state is loaded."""
    to_rollout_s: float
    """Seconds back to rollout: the trainer's state is offloaded, the new weights are loaded."""


@dataclass(frozen=True, slots=True)
class MeasuredTransfers:
    """Seconds per byte of a version in headgate's own code: the `transfer_costs` of `make bench NAME=publish`."""

    copy: float
    """The trainer copies the weights, and computes nothing in the meantime."""
    write: float
    """They are written, with hashes and a delta if there is one, and are safe on the disk."""
    check: float
    """The gateway reads every byte."""
    send: float
    """An engine receives them and compares their hashes; `AT_ONCE` engines do so concurrently."""
    swap: float
    """An engine pauses for them."""
    fixed_s: float = 0.0
    """Seconds for each engine in addition to its bytes: pause, probe and resume."""


def _kind(table: str, name: str) -> dict[str, Any]:
    found = coefficients()[table]
    if name not in found:
        raise ScenarioError(
            f"no {table} {name!r} in coefficients.toml; there are: {', '.join(sorted(found))}"
        )
    kind: dict[str, Any] = found[name]
    return kind


def engine_costs(model: str, gpu: str, gpus: int, slots: int = 0) -> EngineCosts:
    """Return the costs of an engine of `gpus` GPUs. Raise ScenarioError if the model does not fit."""
    shape, card, share, fixed = (
        _kind("model", model),
        _kind("gpu", gpu),
        coefficients()["efficiency"],
        coefficients()["engine"],
    )
    weights = _BYTES * shape["parameters"]
    a_token = 2 * _BYTES * shape["layers"] * shape["kv_heads"] * shape["head_dim"]
    bandwidth = card["bandwidth"] * gpus * share["decode_bandwidth"]
    flops = card["flops"] * gpus
    free = (card["memory"] * gpus - weights) * share["cache_share"]
    if free < a_token * 1024:
        raise ScenarioError(f"model {model} leaves no room for a cache on {gpus} {gpu}")
    exchange = fixed["exchange_s"] * shape["layers"] if gpus > 1 else 0.0
    return EngineCosts(
        EngineModel(
            s_per_kv_token=a_token / bandwidth,
            s_per_batch=weights / bandwidth,
            s_per_call=2 * shape["parameters"] / (flops * share["decode_flops"]),
            s_per_step=fixed["step_s"] + exchange,
        ),
        prefill_s=2 * shape["parameters"] / (flops * share["prefill_flops"]),
        capacity=int(free / a_token),
        slots=slots or fixed["slots"],
    )


def trainer_costs(model: str, gpu: str) -> TrainerCosts:
    """Return the costs of a trainer of that model on that kind of GPU."""
    shape, card, train = _kind("model", model), _kind("gpu", gpu), coefficients()["train"]
    a_flop = shape["parameters"] / (card["flops"] * coefficients()["efficiency"]["train_flops"])
    return TrainerCosts(
        token_s=train["flops_per_token"] * a_flop,
        step_s=train["step_s"],
        spread=train["spread"],
    )


AT_ONCE = 4
"""Engines to which the trainer's server sends concurrently (`gateway/updates/collective.py`)."""


def measured_costs(
    measured: MeasuredTransfers, model: str, gpus_per_engine: int, engines: int, train_gpus: int
) -> TransferCosts:
    """Return transfer costs by measurements of the code, unless the links are slower."""
    weights = _BYTES * _kind("model", model)["parameters"]
    link, costs = coefficients()["link"], transfer_costs(model, gpus_per_engine, train_gpus)
    send = weights * max(measured.send, 1 / link["fabric"]) * math.ceil(engines / AT_ONCE)
    return replace(
        costs,
        push_s=weights * max(measured.copy, 1 / (train_gpus * link["pcie"])),
        delay_s=weights * (measured.write + measured.check) + send,
        pull_s=measured.fixed_s + weights * max(measured.swap, 1 / (gpus_per_engine * link["pcie"])),
    )


def transfer_costs(model: str, gpus_per_engine: int, train_gpus: int) -> TransferCosts:
    """Return the transfer costs of that model's weights."""
    weights = _BYTES * _kind("model", model)["parameters"]
    link, state = coefficients()["link"], coefficients()["train"]["bytes_per_parameter"] / _BYTES * weights
    load = weights / (gpus_per_engine * link["pcie"])
    offload = state / (train_gpus * link["pcie"])
    return TransferCosts(
        push_s=weights / (train_gpus * link["pcie"]),
        delay_s=weights / link["fabric"],
        pull_s=link["fixed_s"] + load,
        to_train_s=link["fixed_s"] + offload,
        to_rollout_s=link["fixed_s"] + offload + load,
    )
