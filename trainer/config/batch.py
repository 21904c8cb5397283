"""`[batch]` and `[credit]`: how a batch is cut for the device, and how its rewards become advantages."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from headgate.configuration import Section


class BatchSettings(Section):
    """`[batch]`: how a batch is cut for the device."""

    tokens: int = Field(8192, ge=16, le=2**24)
    """Tokens of a micro-batch; a shared prefix counts once. Training on a batch begins once its first groups fill one."""


class CreditSettings(Section):
    """`[credit]`: how rewards become advantages of calls, and how truncated episodes are treated."""

    level: Literal["episode", "call", "branch"] = "episode"
    """`episode`: all tokens of an episode have one advantage, from its whole reward. `call`: the tokens of a call have their own
    advantage, from the rewards of that call and of later ones; the k-th calls of a group's episodes are compared. `branch`: the
    rewards of later calls are the mean over the branches behind the call, and calls after the same prompt are compared."""
    discount: float = Field(1.0, ge=0, le=1)
    """Without `level = "episode"`: a reward that arrives n calls later counts `discount ** n`."""
    truncated: Literal["train", "mask", "penalize"] = "train"
    """The treatment of an episode with a call that stopped at its token limit (finish reason `length`); with `level = "call"`,
    of that call only. `train`: no difference. `mask`: its tokens are not trained, and its reward still counts in the baseline.
    `penalize`: `penalty` is subtracted from its reward."""
    penalty: float = Field(1.0, ge=0, le=1e6)
    """Subtracted from the reward of a truncated episode (`penalize`), and at most by `overlong_buffer`."""
    overlong_buffer: int = Field(0, ge=0, le=2**24)
    """Soft overlong punishment (DAPO): the number of tokens before `overlong_limit` over which the reward falls; 0: off."""
    overlong_limit: int = Field(0, ge=0, le=2**24)
    """The sampled tokens of an episode (with `level = "call"`: of a call) at which the whole `penalty` is subtracted."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.discount < 1 and self.level == "episode":
            raise ValueError(
                '`discount` below 1 needs `level = "call"` or "branch": an episode has one reward'
            )
        if self.overlong_buffer > self.overlong_limit:
            raise ValueError("`overlong_buffer` needs an `overlong_limit` that is at least as large")
        return self
