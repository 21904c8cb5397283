"""Models of a stated shape with random bfloat16 weights, and the step that makes the next version of them.

A step adds what AdamW adds at a learning rate to 32-bit weights, of which bfloat16 is published. The ratio of Adam's moments is
normal with the deviation that it has for gradients that are noise alone (`NOISE`), or one of the two values that it has in the
very first step, whatever the gradients are (`FIRST`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headgate.weights import delta, folders
from headgate.weights.manifest import (
    FORMAT,
    MANIFEST,
    entry_of,
)

NAME = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
NOISE = math.sqrt((1 - 0.9) / (1 + 0.9))
"""The deviation of m / sqrt(v) with Adam's betas of 0.9 and 0.999."""
FIRST = -1.0
"""Stands for a ratio of plus or minus one."""
_RANK = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen3 of some size; the head is tied."""

    name: str
    layers: int
    hidden: int
    inner: int
    queries: int
    keys: int
    vocabulary: int

    def tensors(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield names and shapes of the matrices; the norms, which are few, are left out."""
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            for name, rows, columns in (
                ("self_attn.q_proj", self.queries, self.hidden),
                ("self_attn.k_proj", self.keys, self.hidden),
                ("self_attn.v_proj", self.keys, self.hidden),
                ("self_attn.o_proj", self.hidden, self.queries),
                ("mlp.gate_proj", self.inner, self.hidden),
                ("mlp.up_proj", self.inner, self.hidden),
                ("mlp.down_proj", self.hidden, self.inner),
            ):
                yield f"model.layers.{layer}.{name}.weight", (rows, columns)


SHAPES = {
    "0.6b": Shape("0.6b", 28, 1024, 3072, 2048, 1024, 151_936),
    "0.3b": Shape("0.3b", 14, 1024, 3072, 2048, 1024, 75_968),
    "demo": Shape("demo", 2, 128, 256, 128, 128, 272),
}


def next_states(shape: Shape, lr: float, ratio: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the published weights before and after a step."""
    generator = torch.Generator().manual_seed(7)
    before, after = {}, {}
    for name, size in shape.tensors():
        master = torch.empty(size).normal_(0, 0.02, generator=generator)
        before[name] = master.bfloat16()
        added = torch.empty(size).normal_(0, abs(ratio), generator=generator)
        after[name] = master.add_(added.sign_() if ratio == FIRST else added, alpha=-lr).bfloat16()
    return before, after


def adapter_of(shape: Shape) -> dict[str, Any]:
    """Return random factors for each matrix of the layers."""
    found = {}
    for name, (rows, columns) in shape.tensors():
        if "layers" in name:
            found[f"{name}.lora_A"] = torch.randn(_RANK, columns).bfloat16()
            found[f"{name}.lora_B"] = torch.randn(rows, _RANK).bfloat16()
    return found


def write(root: Path, version: int, state: dict[str, Any], *, name: str = NAME, deltas: bool = False) -> Path:
    """Write a version as the trainer does: safetensors, a delta, hashes, fsync, rename."""
    partial, target = root / f".{version}", root / folders.name_of(version)
    partial.mkdir(parents=True)
    save_file(state, partial / name)
    if deltas:
        delta.write(partial / delta.NAME, root / folders.name_of(version - 1), partial)
    files = {file.name: entry_of(file) for file in sorted(partial.iterdir())}
    manifest = {"format": FORMAT, "version": version, "parent": version - 1, "files": files}
    (partial / MANIFEST).write_text(json.dumps(manifest))
    for path in (*partial.iterdir(), partial):
        folders.sync(path)
    os.rename(partial, target)
    return target
