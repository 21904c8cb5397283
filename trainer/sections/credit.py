"""`[credit]`: how rewards become advantages of calls, and what becomes of truncated episodes."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from scheduler.configuration import Section


class CreditSettings(Section):
    """`[credit]`: how rewards become advantages of calls, and what becomes of truncated episodes."""

    level: Literal["episode", "call"] = "episode"
    """`episode`: all tokens of an episode have one advantage, by its whole reward. `call`: those of a call have their own, by
    what was posted on it and on later ones; the k-th calls of a group's episodes are compared with each other."""
    discount: float = Field(1.0, ge=0, le=1)
    """With `level = "call"`: a reward that comes n calls later counts `discount ** n`."""
    truncated: Literal["train", "mask", "penalise"] = "train"
    """The treatment of an episode with a call that was cut at its token limit (finish reason `length`); with `level = "call"`, of
    that call alone. `train`: nothing. `mask`: its tokens are not trained, while its reward still counts in the baseline.
    `penalise`: `penalty` is taken off its reward."""
    penalty: float = Field(1.0, ge=0, le=1e6)
    """With `truncated = "penalise"`."""
    overlong_buffer: int = Field(0, ge=0, le=2**24)
    """Soft overlong punishment (DAPO): the number of tokens before `overlong_limit` in which the reward falls; 0: off."""
    overlong_limit: int = Field(0, ge=0, le=2**24)
    """The sampled tokens of an episode (with `level = "call"`: of a call) at which all of `overlong_penalty` is taken off."""
    overlong_penalty: float = Field(1.0, ge=0, le=1e6)
    """The most that `overlong_buffer` takes off a reward."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.discount < 1 and self.level == "episode":
            raise ValueError('`discount` below 1 needs `level = "call"`: an episode has one reward')
        if self.overlong_buffer > self.overlong_limit:
            raise ValueError("`overlong_buffer` needs an `overlong_limit` that is not below it")
        return self
