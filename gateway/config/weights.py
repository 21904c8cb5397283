"""Versions that come over HTTP: `[weights]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr

from headgate.configuration import Seconds, Section

Origin = Annotated[str, Field(pattern=r"^https?://[^/?#@]+$", max_length=1024)]
"""The root of a server, such as `http://trainer:8100`."""


class WeightsSettings(Section):
    """`[weights]`: the servers of versions. Without `sources`, trainer, gateway and engines share folders."""

    sources: tuple[Origin, ...] = ()
    """Servers of trainers (`[publish] transport` is "http" or "collective" there); no other is used."""
    dir: Path = Path("runs/versions")
    """This gateway's copies, a folder for each model. Engines that it starts load from here."""
    keep: int = Field(3, ge=2, le=10_000)
    """The number of versions that are kept; the newest live one and its parent always are."""
    key: SecretStr | None = Field(None, min_length=1)
    """The key of sources and of the engines' mirrors; or HEADGATE_WEIGHTS_KEY."""
    limit_mb_s: float | None = Field(None, gt=0, le=1_000_000)
    """The most megabytes (10^6) a second that this gateway fetches; no limit if absent. Mirrors have their own."""
    fetch_s: Seconds = 600.0
    """Seconds that fetching a version may take: to this gateway, and then to all mirrors."""
    backend: Literal["auto", "gloo", "nccl", "nccl_m2n", "ipc"] = "auto"
    """How the bytes reach engines with `[engine] transport = "collective"`: `gloo` by TCP; `nccl` through accelerators at both
    ends; `nccl_m2n` the same from all accelerators of the trainer's machine; `ipc` through the memory of the one machine
    that trainer and engine share: the trainer's own, opened in place, with its `[publish] transport = "ipc"`. `auto`: that where
    engines can open it; NCCL where both have accelerators and no common one, `ipc` where they share an accelerator and
    `/dev/shm`, else gloo. What an installation cannot do is refused, with the reason."""
    transfer_s: Seconds = 30.0
    """The deadline of each operation of such a transfer: to form the group, to send 16 MiB, to receive the confirmations."""
