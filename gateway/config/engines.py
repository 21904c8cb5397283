"""Engines and how weights reach them: `[engine]`, `[update]`; an upstream model's address."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, model_validator

from headgate.configuration import Seconds, Section

MAX_LORAS = 2
"""Adapters that an engine runs next to one another: a version and the one before. Each more reserves memory in the engine."""
_METADATA = frozenset({"100.100.100.200", "192.0.0.192", "fd00:ec2::254"})
"""Addresses of clouds' metadata services (Alibaba, Oracle, AWS on IPv6) that are not link-local."""

_SPECULATIVE = ("--speculative", "-sc", "--spec-")
"""Arguments that turn on vLLM's speculative decoding (lab/notes/speculative.md)."""


class EngineSettings(Section):
    """`[engine]`, or `[models.NAME.engine]`: the servers that turn token ids into token ids."""

    launch: Literal["vllm", "fake", "external"] = "vllm"
    """`vllm` and `fake` are started and restarted as child processes; `external` runs already, at `url`."""
    count: int = Field(1, ge=0, le=256)
    """Engines to start; more can be added and removed at /admin/v1/engines."""
    url: str | None = None
    """The URL of the one external engine."""
    urls: tuple[str, ...] = ()
    """The URLs of several external engines, instead of `url`."""
    mirrors: tuple[str, ...] = ()
    """The mirror (`gateway mirror`) of each of `urls`, for external engines on other machines that get versions over HTTP
    (`[weights] sources`). An engine with an empty one reads the gateway's own copies."""
    api: Literal["vllm", "sglang"] = "vllm"
    """The API of an external or fake engine."""
    transport: Literal["files", "collective", "lora"] = "files"
    """How engines load trained versions. `files`: each loads a folder; `collective`: the trainer's server sends them straight to
    vLLM's workers (`[weights] sources`, `backend`); `lora`: each version is an adapter on top of the first version's weights, and
    nothing pauses (docs/topics/weights.md). External engines need options of theirs for the latter two."""
    max_lora_rank: Literal[8, 16, 32, 64, 128, 256, 320, 512] = 16
    """The greatest rank of an adapter: the trainer's `[model.lora] rank`, or more. Engines reserve memory for it."""
    allow_public: bool = False
    """True: external engines may have public addresses. A client that reaches one controls it: vLLM requires its API key only
    under /v1, and not where it is paused, given weights or sent requests for tokens."""
    python: str = "python"
    """The interpreter of vLLM's environment."""
    tensor_parallel: int = Field(1, ge=1, le=64)
    """GPUs over which vLLM spreads each layer of one engine (`launch = "vllm"`); a cluster reserves that many for it."""
    quantization: Literal["fp8_per_channel", "fp8_per_tensor", "fp8_per_block"] | None = None
    """vLLM rounds the matrices of each version to float8 as it loads them; the trainer goes on in its own dtype. Recorded
    log-probabilities are those of the rounded weights. For an external engine: how it was started."""
    args: tuple[str, ...] = Field((), repr=False)
    """Further arguments for the engine's command line."""
    env: dict[str, str] = Field({}, repr=False)
    """Further variables of the engine's environment."""
    log: Path = Path("runs/engine.log")
    """Each engine's name is put before the suffix: `runs/engine-NAME-0.log`."""
    sleep: Literal["auto", "pause", "level1", "level2"] = "auto"
    """How an engine sleeps on a node that its trainer has: `pause` keeps its memory (all that there is without an accelerator);
    `level1` moves its weights to the host's memory and frees the rest; `level2` frees everything. `auto`: `level1` if the engine
    supports that, else `pause`; vLLM is started with support for it where there is an accelerator."""
    start_s: Seconds = 180.0
    """Seconds that an engine may take to start before it is killed and started again."""
    stall_s: Seconds = 60.0
    """Seconds without a token in the middle of a generation after which another engine continues the call."""
    health_s: Seconds = 2.0
    """Seconds between health checks of engines. An engine that fails three in a row counts as dead."""
    max_restarts: int = Field(3, ge=0, le=100)
    """Restarts in 10 minutes (or in the time that this many starts may take) after which an engine is given up until the next
    version is published."""

    @model_validator(mode="after")
    def _external_has_url(self) -> Self:
        if (self.launch == "external") != (self.url is not None or bool(self.urls)):
            raise ValueError("`url` or `urls` is needed with launch = 'external', and only then")
        if self.url is not None and self.urls:
            raise ValueError("set `url` or `urls`, not both")
        if self.mirrors and len(self.mirrors) != len(self.places):
            raise ValueError(
                f"`mirrors` has {len(self.mirrors)} for {len(self.places)} engines: one for each is needed"
            )
        if self.mirrors and self.launch != "external":
            raise ValueError("`mirrors` is for launch = 'external'")
        if self.launch != "vllm" and self.tensor_parallel > 1:
            raise ValueError(
                "`tensor_parallel` is for launch = 'vllm': an engine that is started elsewhere has its own option for it"
            )
        if speculative := [arg for arg in self.args if arg.startswith(_SPECULATIVE)]:
            raise ValueError(
                f"`args`: {speculative[0]!r} is refused: vLLM then returns log-probabilities that are not those of its model"
            )
        if self.quantization and (self.launch == "fake" or self.api == "sglang"):
            raise ValueError("`quantization` is for vLLM: leave it out")
        if self.transport != "files" and self.api == "sglang":
            raise ValueError(
                f"transport = {self.transport!r} is for vLLM alone: SGLang takes weights from folders"
            )
        if self.transport == "lora" and self.sleep == "level2":
            raise ValueError("sleep = 'level2' drops the weights that adapters need: use 'level1' or 'pause'")
        if self.transport == "collective" and self.mirrors:
            raise ValueError("transport = 'collective' needs no `mirrors`: leave them out")
        if self.launch == "external" and self.count > 1:
            raise ValueError(
                "`count` is not for launch = 'external': name each engine in `urls`, or add it at /admin/v1/engines"
            )
        for url in (self.url, *self.urls, *self.mirrors):
            allow_public = self.allow_public or url in self.mirrors
            host = urlsplit(url or "").hostname or ""
            if refused := refused_place(url or "", host, allow_public=allow_public):
                raise ValueError(refused[1])
        return self

    @property
    def restart_window_s(self) -> float:
        """The time in which `max_restarts` counts: long enough for all of them."""
        return max(600.0, (self.max_restarts + 1) * self.start_s)

    @property
    def places(self) -> tuple[str | None, ...]:
        """One for each engine at the start: where it is, or None if it is to be started."""
        if self.launch == "external":
            return self.urls or (self.url,)
        return (None,) * self.count


class UpstreamSettings(Section):
    """`[models.NAME.upstream]`: a third party's OpenAI-compatible API. Its calls are recorded and never trained."""

    url: str = Field(pattern="^https?://")
    """With the `/v1`."""
    model: str | None = None
    """The model's name there, if it is another."""
    key: SecretStr | None = None
    """The API key that is sent there."""
    timeout_s: Seconds = 600.0
    """Seconds without data after which a call fails."""


class UpdateSettings(Section):
    """`[update]`: how engines load a new version, the deadlines of the steps, and how exact the probe must be."""

    mode: Literal["abort", "keep"] = "abort"
    """`abort`: engines give their requests back, which continue after the update, on any engine. `keep`: requests freeze in their
    engine."""
    order: Literal["rolling", "pull"] = "pull"
    """`pull`: a version is live as soon as one engine runs it, and the others load it when they have little to do, or when a call
    waits that needs it (`[routing]`). `rolling`: one engine after the other."""
    pause_timeout_s: Seconds = 30.0
    """Seconds that an engine may take to pause and give its requests back."""
    load_s: Seconds | None = None
    """Seconds that an engine may take to load a version. By default 120, and 10 for each GB of the weights: what a disk or
    a network of 100 MB/s needs. Engines that the gateway starts and that read folders have 100 for each GB, because it
    sees their bytes: a load that has read nothing for 120 s is stuck, and ends."""
    probe: bool = True
    """Each version needs a probe, and each engine passes it before it serves the version. False is for engines that do not
    compute from the weights (`launch = "fake"`): nothing then shows what they sample with."""
    probe_tolerance: float = Field(0.15, gt=0, le=5)
    """The mean gap (nats) between an engine's log-probabilities and the manifest's that still passes. An engine that is proven to
    hold the version also passes with up to four times its usual gap, which float8 needs."""
    prove: bool = True
    """Engines compare their tensors with each version, bit by bit. False leaves that out, where it takes too long: then the
    probe alone decides, which cannot detect differences that are smaller than the noise of the engine's arithmetic."""
    orphans: Literal["drop", "correct"] = "drop"
    """The treatment of samples whose version is not an ancestor of the newest: `drop` does not train their tokens; `correct` does
    (the correction by importance sampling treats them as samples of another policy)."""
    canary: float = Field(0.0, ge=0, le=0.5)
    """The share of new conversations of `live` agents that get a new version before all others do; 0: none. It needs a second
    engine, and order = "pull" (docs/guide/live.md)."""
    canary_conversations: int = Field(100, ge=10, le=1_000_000)
    """The number of a new version's rewarded conversations after which it is promoted, if its rewards are not lower by then."""


def is_public(address: str) -> bool:
    """Return whether an IP address can be reached from everywhere; False for a name."""
    ip = _ip(address)
    return ip is not None and ip.is_global


def is_metadata(address: str) -> bool:
    """Return whether an IP address is link-local, or another at which a cloud serves credentials; False for a name."""
    ip = _ip(address)
    return ip is not None and (ip.is_link_local or str(ip) in _METADATA)


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return mapped or ip


def refused_place(url: str, address: str, *, allow_public: bool) -> tuple[str, str] | None:
    """Return the code and the message by which an engine at `url` is refused; None if it may be there.

    `address`: the URL's host, or an address of that name.
    """
    if is_metadata(address):
        return "link_local_engine", (
            f"{url.rpartition('@')[2]}: an engine cannot have a link-local address: clouds serve credentials at them. "
            "Name an address of a private network"
        )
    if not allow_public and is_public(address):
        return "public_engine", public_engine(url)
    return None


def public_engine(url: str) -> str:
    """Return the reason why an engine is refused at a public address."""
    return (
        f"{url.rpartition('@')[2]}: an engine at a public address can be paused, reloaded and read by any client, because vLLM's "
        "control endpoints ignore its API key; put it on loopback or a private network, or set `allow_public = true`"
    )
