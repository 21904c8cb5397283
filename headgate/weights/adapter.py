"""Adapters as versions: which tensors peft's files of a LoRA adapter must have for a checkpoint.

A matrix W of shape (out, in) that the configuration chooses has two factors, `lora_A` of shape (rank, in) and `lora_B` of shape
(out, rank), and the engine computes by W + alpha / rank * B A.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headgate.weights.tensors import Tensor, tensors_of

CONFIG = "adapter_config.json"
FACTORS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_WEIGHT = ".weight"
_NOT_ADAPTED = {"lm_head", "embed_tokens"}


class _Config(BaseModel):
    """The part of peft's configuration that changes what an engine computes. Everything beyond plain LoRA has to be off."""

    model_config = ConfigDict(extra="ignore")

    peft_type: str = Field("LORA", pattern="^LORA$")
    r: int = Field(ge=1)
    lora_alpha: float = Field(gt=0)
    target_modules: list[str]
    target_parameters: list[str] | None = None
    """Weights of layers that `target_modules` cannot name, since peft takes the names for those of experts."""
    bias: str = Field("none", pattern="^none$")
    modules_to_save: None = None
    use_dora: bool = Field(False, le=False)
    use_rslora: bool = Field(False, le=False)
    fan_in_fan_out: bool = Field(False, le=False)
    rank_pattern: dict[str, int] = Field({}, max_length=0)
    alpha_pattern: dict[str, float] = Field({}, max_length=0)

    def targets(self) -> Iterator[str]:
        """Yield what names of adapted matrices are, or end with after a point."""
        yield from self.target_modules
        yield from (name.removesuffix(_WEIGHT) for name in self.target_parameters or ())

    def chooses(self, module: str) -> bool:
        """Return whether a matrix has an adapter, by peft's rule."""
        return any(f".{module}".endswith(f".{target}") for target in self.targets())


def matrices_of(checkpoint: Path) -> list[str]:
    """Return the last names of the matrices that adapters may change: all but embedding and output head. Raise Malformed.

    vLLM 0.32 on the CPU ends when it scores a sequence together with other requests, if its output head may have an adapter.
    """
    names = (name.removesuffix(_WEIGHT) for name, t in tensors_of(checkpoint).items() if len(t.shape) == 2)
    return sorted({name.rpartition(".")[2] for name in names} - _NOT_ADAPTED)


def misfit(config: Any, base: Mapping[str, Tensor], found: Mapping[str, Tensor], max_rank: int) -> str:
    """Return the first thing that is wrong with an adapter; "" if nothing is.

    `config`: the JSON value of `adapter_config.json`; `base`: the tensors of the checkpoint; `found`: those of the adapter.
    """
    try:
        parsed = _Config.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{CONFIG}: {'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']} (plain LoRA is what engines get)"
    if parsed.r > max_rank:
        return f"its rank is {parsed.r}, and engines take {max_rank} at most ([engine] max_lora_rank)"
    if wrong := _NOT_ADAPTED & {target.rpartition(".")[2] for target in parsed.targets()}:
        return f"{CONFIG}: target_modules: engines support no adapters of {min(wrong)!r}"
    return next(_misfits(parsed, base, found), "")


def _misfits(config: _Config, base: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Iterator[str]:
    expected = _factors(config, base)
    for name, tensor in sorted(found.items()):
        if name not in expected:
            yield f"tensor {name!r} is not a factor of a matrix that {CONFIG} chooses in the first version's checkpoint"
        elif tensor.shape != expected[name]:
            yield f"tensor {name!r} has the shape {list(tensor.shape)}, and needs {list(expected[name])}"
        elif tensor.dtype not in ("F64", "F32", "F16", "BF16"):
            yield f"tensor {name!r} is of {tensor.dtype}, which is not floating-point"
    for name in sorted(expected.keys() - found.keys()):
        yield f"tensor {name!r} is missing"
    if not expected:
        yield f"{CONFIG} chooses no matrix of the first version's checkpoint"


def _factors(config: _Config, base: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Return the shape of each factor, by its name."""
    shapes: dict[str, tuple[int, int]] = {}
    for name, tensor in base.items():
        module = name.removesuffix(_WEIGHT)
        if len(tensor.shape) == 2 and module != name and config.chooses(module):
            outer, inner = tensor.shape
            shapes[f"{_PREFIX}{module}.lora_A.weight"] = (config.r, inner)
            shapes[f"{_PREFIX}{module}.lora_B.weight"] = (outer, config.r)
    return shapes
