"""`[sft]`: supervised fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from headgate.configuration import Section
from trainer.config.run import RunSettings


class SftRunSettings(RunSettings):
    """`[run]` of `trainer sft`."""

    steps: int = Field(10_000_000, ge=1, le=10_000_000)
    """The run ends after this many steps, or after its epochs, whichever is first."""


class SftSettings(Section):
    """`[sft]`: what is learned, and how often."""

    data: Annotated[tuple[Path, ...], Field(min_length=1)]
    """`.jsonl` files of conversations (`messages`, optionally `tools`, as in OpenAI's fine-tuning files), of which the
    assistant's messages are learned; and `.parquet` files of recorded episodes (`gateway export`), of which the sampled tokens
    are."""
    min_reward: float | None = None
    """The least reward of a recorded episode that is learned; all if absent."""
    epochs: int = Field(1, ge=1, le=10_000)
    """Passes over the data, each in another order."""
    batch_size: int = Field(32, ge=1, le=1_000_000)
    """Conversations and episodes of one step."""
    held_out_share: float = Field(0.0, ge=0, lt=1)
    """The share of the data that is not learned; its loss is measured before the first step and after every epoch."""
    max_tokens: int | None = Field(None, ge=2)
    """Conversations and episodes with a longer path are left out and reported; none if absent."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, such as `{ enable_thinking = false }`."""

    @model_validator(mode="after")
    def _are_known(self) -> Self:
        for path in self.data:
            if path.suffix not in (".jsonl", ".parquet"):
                raise ValueError(f"data: {path} is neither a .jsonl nor a .parquet file")
        return self
