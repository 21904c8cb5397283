"""What a teacher's scores do to the advantages of sampled tokens.

Source: Lu et al., "On-Policy Distillation" (Thinking Machines Lab, 2025): the advantage of a token is minus the reverse KL's
estimate, teacher's - sampler's log-probability, without a baseline or a discount. Pure: no I/O, no model.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headgate.types import Node
from trainer.config.distill import DistillSettings
from trainer.errors import FeedBroken

Float64Array = npt.NDArray[np.float64]


def gaps(node: Node) -> Float64Array:
    """Return teacher's - recorded log-probability of a sampled node's tokens, shape (n,), nats; NaN where it gave none."""
    if node.teacher is None:
        return np.full(len(node.ids), np.nan)
    return node.teacher.astype(np.float64) - node.logprobs


def advantages(node: Node, reward: float, settings: DistillSettings | None) -> Float64Array:
    """Return the advantages of a node's tokens, shape (n,); `reward`: the one that its rewards give.

    Raise FeedBroken for tokens of another temperature than 1 or a truncated distribution, whose log-probabilities the teacher's
    do not compare with.
    """
    found = np.full(len(node.ids), reward)
    if settings is None or not node.sampled or node.teacher is None:
        return found
    if node.temperature != 1.0:
        raise FeedBroken(
            f"tokens were sampled at temperature {node.temperature:g}, and the teacher of [distill] scores at 1: set [sampling]"
            " temperature = { override = 1.0 } in the gateway's file"
        )
    if node.kept is not None:
        raise FeedBroken(
            "tokens were sampled with top_p, top_k or min_p, and the teacher of [distill] scores without: set kept_tokens = 0 in"
            " [models.NAME] of the gateway's file, which masks such tokens"
        )
    taught = np.nan_to_num(gaps(node), nan=0.0).clip(-settings.cap, settings.cap)
    return settings.reward_weight * found + settings.weight * taught
