"""How exactly two ranks that share a mixture's experts compute what one rank computes.

Both ranks compute the same packed rows, so that log-probabilities are those of one rank, and gradients are twice its.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headgate.processes.ports import free_port
from trainer.config.settings import Settings
from trainer.model import parallel
from trainer.model.policy import Policy
from trainer.rank_trainer import RankTrainer

RANKS = 2
_LIMIT_S = 600.0
Computed = tuple[Tensor, dict[str, Tensor]]
"""Log-probabilities, and the gradients by name."""
Compute = Callable[[Policy], Tensor]
"""A function of a module that returns a policy's log-probabilities, and adds a gradient."""


def expert_ranks_gap(alone: Policy, settings: Settings, compute: Compute) -> float:
    """Return the largest gap of a log-probability in nats, or relative error of a gradient if that is larger.

    `settings`: those of `alone`, with expert ranks; their `[run] dir` gets a file.
    """
    expected, gradients = _computed(alone, compute)
    found, shared = _on_ranks(settings, compute)
    gap = float((found - expected).abs().max())
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, given in shared.items():
        # Ranks that share weights have a gradient of 0 where one rank has none.
        gradient = gradients.get(name, torch.zeros_like(given))
        error = float((given / RANKS - gradient).abs().max())
        gap = max(gap, error / max(float(gradient.abs().max()), 1e-2 * largest))
    return gap


def _computed(policy: Policy, compute: Compute) -> Computed:
    """Return what a policy computes; whole on every rank. Collective."""
    policy.zero_grad()
    logprobs = compute(policy).detach()
    named: Mapping[str, Any] = dict(policy.model.named_parameters())
    return logprobs, {
        name: parallel.whole(weight.grad) for name, weight in named.items() if weight.grad is not None
    }


def _on_ranks(settings: Settings, compute: Compute) -> Computed:
    """Return what the ranks compute. Raise RuntimeError if one fails; its traceback is on the terminal."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, compute.__module__])
    out, port = settings.run.dir / "computed.pt", free_port()
    out.parent.mkdir(parents=True, exist_ok=True)
    ranks = [
        context.Process(target=_rank, args=(rank, port, settings, compute, out), daemon=True)
        for rank in range(RANKS)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(_LIMIT_S)
        each.kill()
    if any(each.exitcode for each in ranks):
        raise RuntimeError(f"of {RANKS} expert ranks, one failed")
    found: Computed = torch.load(out)
    return found


def _rank(rank: int, port: int, settings: Settings, compute: Compute, out: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    trainer = RankTrainer.open(settings)
    found = _computed(trainer.policy, compute)
    if rank == 0:
        torch.save(found, out)
    trainer.ranks.close()
