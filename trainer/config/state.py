"""`[checkpoint]` and `[publish]`: what is written, and how long it is kept."""

from __future__ import annotations

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, model_validator

from headgate.configuration import Seconds, Section


class CheckpointSettings(Section):
    """`[checkpoint]`: how often one is written, and how many are kept."""

    every: Annotated[int, Field(ge=1, le=10_000)] | Literal["auto"] = "auto"
    """Steps from one checkpoint to the next. A checkpoint is written during training, from a copy in the host's memory. `auto`:
    so often that saving takes at most 5 % of the time, as measured, and at least every 100 steps. A trainer that was killed
    trains the recorded batches since the newest checkpoint again; it continues if that gives the published weights bit by bit,
    which needs `[run] deterministic`."""
    keep: int = Field(2, ge=1, le=10_000)
    """The number of newest checkpoints to keep."""


class PublishSettings(Section):
    """`[publish]`: the versions that are published, and the way to the engines."""

    keep: int = Field(3, ge=2, le=10_000)
    """The number of versions to keep; the newest version and its parent are always kept."""
    timeout_s: Seconds | None = None
    """Seconds that the engines may take to load a published version. By default 600, and 100 for each GB of it, as the gateway
    itself ends a load that is stuck."""
    transport: Literal["filesystem", "http", "collective", "ipc", "lora"] = "filesystem"
    """`filesystem`: gateway and engines read the folder under `[run] dir`; `http`: this trainer serves it at `listen`, and the
    gateway and the engines' mirrors fetch it; `collective`: the gateway reads the folder, and this trainer sends to the
    workers of engines; `ipc`: the same, and engines on the trainer's GPU open the version in its memory, which keeps a version's
    bytes there (in `/dev/shm` if `[gateway] offload` gives the GPU back); `lora`: versions are the adapters of `[model.lora]`
    only, read from the folder, or served at `listen` if `url` is set (docs/topics/weights.md)."""
    listen: str = Field("127.0.0.1:8100", pattern=r"^[^:/]+:\d{1,5}$")
    """The host and port at which versions are served or requested. Without `key` it must be a loopback address."""
    url: str | None = Field(None, pattern=r"^https?://[^/?#@]+$")
    """The URL by which the gateway reaches `listen`, if it is another address; the gateway's `[weights] sources` must have it.
    With `collective` and `ipc`, engines reach its host too, at any port."""
    delta: bool = False
    """With `http`: also write the exact difference to the previous version. A mirror that has that version fetches only the
    difference; at learning rates of reinforcement learning in bfloat16 it is a few percent of the bytes. Costs reading both
    versions at each step."""
    key: SecretStr | None = Field(None, min_length=1)
    """The key that `http` requires to fetch versions: the gateway's `[weights] key`. Or HEADGATE_WEIGHTS_KEY."""

    @model_validator(mode="after")
    def _can_be_sent(self) -> Self:
        if self.delta and self.sends:
            raise ValueError(
                f"transport = {self.transport!r} sends versions whole: leave `delta` out, or use 'http'"
            )
        if self.delta and self.transport == "lora":
            raise ValueError("transport = 'lora' publishes adapters, which change whole: leave `delta` out")
        if self.sends and self.engine_facing_host == "0.0.0.0":
            raise ValueError(
                f"transport = {self.transport!r} needs `url`: the address at which engines reach this machine"
            )
        return self

    @property
    def engine_facing_host(self) -> str:
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
        return self.source is not None or self.sends

    @property
    def sends(self) -> bool:
        """True if this trainer's server sends versions to the workers of engines."""
        return self.transport in ("collective", "ipc")
