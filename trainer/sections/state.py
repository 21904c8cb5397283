"""`[checkpoint]` and `[weights]`: what is written, and how long it is kept."""

from __future__ import annotations

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, model_validator

from scheduler.configuration import Seconds, Section


class CheckpointSettings(Section):
    """`[checkpoint]`: how often one is written, and how many are kept."""

    every: Annotated[int, Field(ge=1, le=10_000)] | Literal["auto"] = "auto"
    """Steps from one checkpoint to the next; it is written while training goes on, from a copy in the host's memory. `auto`: as
    often as saving one takes at most 5 % of the time since the one before, as measured, and after 100 steps at the latest. A
    trainer that was killed trains the recorded batches since the newest again, and goes on if that gives the published weights to
    the bit, which needs `[run] deterministic`."""
    keep: int = Field(2, ge=1, le=10_000)
    """Checkpoints to keep, the newest."""


class WeightsSettings(Section):
    """`[weights]`: published versions."""

    keep: int = Field(3, ge=2, le=10_000)
    """Directories kept; the current version and its parent always are."""
    publish_s: Seconds = 600.0
    """How long the engines may take to run a published version."""
    transport: Literal["filesystem", "http", "collective", "lora"] = "filesystem"
    """`filesystem`: gateway and engines read the folder under `[run] dir`; `http`: this trainer serves it at `listen`, and the
    gateway and the mirrors beside engines fetch it; `collective`: the gateway reads the folder, and this trainer sends to the
    workers of engines; `lora`: versions are the adapters of `[model.lora]` alone, read from the folder, or served at `listen` if
    `url` is set (docs/topics/weights.md)."""
    listen: str = Field("127.0.0.1:8100", pattern=r"^[^:/]+:\d{1,5}$")
    """The host and port at which versions are served or asked for. Without `key` it must be a loopback address."""
    url: str | None = Field(None, pattern=r"^https?://[^/?#@]+$")
    """The URL by which the gateway reaches `listen`, if it is another address; the gateway's `[weights] sources` must have it.
    With `collective` engines reach its host too, at any port."""
    delta: bool = False
    """Also write the exact difference to the previous version, with `http`. Who has that version fetches this alone; at learning
    rates of reinforcement learning in bfloat16 it is a few percent of the bytes. Costs reading both versions at each step."""
    key: SecretStr | None = Field(None, min_length=1)
    """The key that `http` asks of those who fetch versions: the gateway's `[weights] key`. Or HEADGATE_WEIGHTS_KEY."""

    @model_validator(mode="after")
    def _can_be_sent(self) -> Self:
        if self.delta and self.transport == "collective":
            raise ValueError(
                "transport = 'collective' sends versions whole: leave `delta` out, or use 'http'"
            )
        if self.delta and self.transport == "lora":
            raise ValueError("transport = 'lora' publishes adapters, which change whole: leave `delta` out")
        if self.transport == "collective" and self.reached_at == "0.0.0.0":
            raise ValueError(
                "transport = 'collective' needs `url`: the address at which engines reach this machine"
            )
        return self

    @property
    def reached_at(self) -> str:
        """The host by which engines reach this trainer."""
        return urlsplit(self.url or f"http://{self.listen}").hostname or ""

    @property
    def source(self) -> str | None:
        """The root at which versions are fetched; None if they are read from the folder."""
        if self.transport == "http":
            return self.url or f"http://{self.listen}"
        return self.url if self.transport == "lora" else None

    @property
    def serves(self) -> bool:
        """True if this trainer runs a server of versions."""
        return self.source is not None or self.transport == "collective"
