"""`[batch]`: how a batch is cut for the device."""

from __future__ import annotations

from pydantic import Field

from scheduler.configuration import Section


class BatchSettings(Section):
    """`[batch]`: how a batch is cut for the device."""

    tokens: int = Field(8192, ge=16, le=2**24)
    """Tokens of a micro-batch, those of a shared prefix once. Training on a batch begins once its first groups fill one."""
