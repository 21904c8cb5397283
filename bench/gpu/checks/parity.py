"""The noise of bf16: the trainer's log-probabilities against transformers' in bf16 and float32, and against another packing."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bench.gpu.batches import settings_of
from bench.gpu.checks.place import Figures, Place, require
from trainer.data.packing import lay_out
from trainer.data.tree import row_of_tokens
from trainer.model.policy import Policy
from trainer.rank_rpc import shutdown_ranks
from trainer.rank_trainer import RankTrainer

SEVERAL = 4.0
"""How many times transformers' own distance from float32 the trainer's may be."""
_ROWS, _DRY_ROWS = (1024, 512, 2048, 256), (24, 40, 17)


def measure(place: Place) -> Figures:
    """Return mean and largest gaps in nats: `trainer` and `transformers` against float32, and `packing`."""
    draw = np.random.default_rng(2)
    vocabulary = place.workload.config["vocab_size"]
    lengths = _DRY_ROWS if place.dry else _ROWS
    rows = [torch.from_numpy(draw.integers(0, vocabulary, length)) for length in lengths]
    exact = _passes(place, "float32", rows)[1]
    packed, plain, alone = _passes(place, "bfloat16", rows)
    figures: Figures = {
        "trainer": _gaps(packed, exact),
        "transformers": _gaps(plain, exact),
        "packing": _gaps(packed, alone),
    }
    bound = SEVERAL * figures["transformers"]["mean"]
    return require(figures["trainer"]["mean"] < bound, "the trainer is further from float32", figures)


def _passes(place: Place, dtype: str, rows: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities of all rows packed, by transformers' own pass, and of each row alone."""
    folder = place.folder / dtype
    trainer = RankTrainer.open(settings_of(place.model(), folder, place.device, model={"dtype": dtype}))
    try:
        policy = trainer.policy
        together = _of_trainer(policy, rows)
        plain = torch.cat(policy.plain(rows)).float().cpu()
        return together, plain, torch.cat([_of_trainer(policy, [row]) for row in rows])
    finally:
        shutdown_ranks(trainer)


def _of_trainer(policy: Policy, rows: list[Tensor]) -> Tensor:
    micro = lay_out([row_of_tokens(tuple(row.tolist())) for row in rows])
    return policy.logprobs(micro).float().cpu()


def _gaps(left: Tensor, right: Tensor) -> dict[str, float]:
    gaps = (left - right).abs()
    return {"mean": float(gaps.mean()), "max": float(gaps.max())}
