"""Models, what they are given and how they are sampled: `[models]`, `[render]`, `[sampling]`."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from gateway.config.engines import EngineSettings, UpstreamSettings
from gateway.config.episodes import StalenessSettings
from headgate.configuration import Section

MAX_CONTEXT = 2**20
"""The most tokens that a model's context can be set to."""


FAMILIES = (
    "qwen3",
    "qwen3.5",
    "qwen3.6",
    "qwen3.8",
    "glm-4.5",
    "glm-5",
    "glm-5.1",
    "llama-3",
    "deepseek-v3",
    "deepseek-r1",
)
"""Names of the `renderers` library whose replies the segmenter can read. In addition to them: `auto` and `template`."""
_CHOICES = (*FAMILIES, "auto", "template")


class ModelSettings(Section):
    """`[models.NAME]`: a model, and the names by which agents may request it."""

    path: Path | None = None
    """A Hugging Face checkpoint: version 0. Needed, unless the model is upstream."""
    train: bool = True
    """False: frozen. Its calls are recorded and never trained."""
    family: str = "qwen3"
    """Which renderer turns messages into tokens and back; `auto` uses the `renderers` library."""
    aliases: tuple[str, ...] | None = None
    """Other names that mean this model; `*` is every name. Without any, a trained model responds in its own
    episodes to every name that no other model has."""
    max_model_len: int = Field(2048, ge=16, le=MAX_CONTEXT)
    """Prompt and completion together, in tokens."""
    thinking: bool = True
    """Passed to families whose template knows `enable_thinking`."""
    images: bool = False
    """True: the model is given the images of messages. For checkpoints of the Qwen-VL family with `family = "template"`, on
    vLLM (docs/topics/images.md); without it a request with an image is refused."""
    router_replay: bool = False
    """True: for a mixture of experts, the experts that each token went through are recorded, and the trainer computes the tokens
    with them (docs/topics/router-replay.md). For vLLM 0.32 and newer."""
    kept_tokens: int = Field(0, ge=0, le=4096)
    """The most tokens that `top_p`, `top_k` or `min_p` may keep for a sampled token to be trained: they are recorded with it,
    and the trainer normalizes over them (docs/topics/algorithms.md#truncated-distributions). Where they keep more, the token is
    masked; 0: everywhere. For vLLM, whose `--max-logprobs` must be as many; the gateway starts it so."""
    engine: EngineSettings | None = None
    """The engines of this model, instead of `[engine]`."""
    upstream: UpstreamSettings | None = None
    staleness: StalenessSettings | None = None
    """The bound of this model, instead of `[staleness]`."""

    @field_validator("family")
    @classmethod
    def _known_family(cls, name: str) -> str:
        if name not in _CHOICES:
            near = difflib.get_close_matches(name, _CHOICES, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"the family {name!r} is not known: use one of {', '.join(_CHOICES)}.{hint}")
        return name

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if (self.path is None) == (self.upstream is None):
            raise ValueError("a model needs `path` or `upstream`, not both")
        if self.upstream is not None and self.images:
            raise ValueError("an upstream model is sent images as they come: leave `images` out")
        if self.upstream is not None and self.router_replay:
            raise ValueError("an upstream model does not report its experts: leave `router_replay` out")
        if self.upstream is not None and self.kept_tokens:
            raise ValueError("an upstream model is not trained: leave `kept_tokens` out")
        if self.upstream is not None and self.train:
            raise ValueError("an upstream model cannot be trained: set `train = false`")
        return self


class RenderSettings(Section):
    """`[render]`: how messages become tokens."""

    special_tokens: Literal["text", "allow"] = "text"
    """How text in messages and tools is read that spells a special token (`<|im_end|>`) or a mark (`<think>`): `text`: as
    letters; `allow`: as the token, with which the author of the text can end a turn and begin another."""


class _Range(Section):
    @model_validator(mode="before")
    @classmethod
    def _is_table(cls, given: Any) -> Any:
        if isinstance(given, int | float):
            raise ValueError(f"write {{ override = {given} }} for the value of every training episode")
        return given


class Bounds(_Range):
    """The range that a training episode may request; the value is clamped, and both values are stored."""

    override: float | None = Field(None, ge=0, le=10)
    """The value that every training episode gets, whatever it requests."""
    min: float = Field(0.0, ge=0, le=10)
    """The least value."""
    max: float = Field(10.0, ge=0, le=10)
    """The greatest value."""

    def apply(self, requested: float) -> float:
        """Return the value to use for a requested one."""
        return self.override if self.override is not None else min(max(requested, self.min), self.max)


class TokenBounds(_Range):
    """The range of `max_tokens` in training episodes. The room in the context bounds it too; both values are stored."""

    override: int | None = Field(None, ge=1, le=2**31 - 1)
    """The value of every call, whatever it requests."""
    min: int = Field(1, ge=1, le=2**31 - 1)
    """The least value."""
    max: int = Field(2**31 - 1, ge=1, le=2**31 - 1)
    """The greatest value."""

    def apply(self, requested: int, room: int) -> int:
        """Return the value to use for a requested one. `room`: the tokens that the context has left."""
        if self.override is not None:
            return min(self.override, room)
        return min(max(requested, min(self.min, room)), self.max)


class SamplingSettings(Section):
    """`[sampling]`: what happens to agents' sampling parameters in training episodes (never in eval episodes)."""

    temperature: Bounds = Bounds()
    top_p: Bounds = Bounds(max=1.0)
    max_tokens: TokenBounds = TokenBounds()
    seed: Literal["keep", "ignore"] = "keep"
    """`ignore`: a request's `seed` is not passed on; members of a group that all send the same one would otherwise be equal."""
