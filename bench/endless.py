"""Versions of a tiny model whose replies never end by themselves, for fake engines and for vLLM.

Only the tokens of `BLOCK` are sampled, all with the same probability, and each is one character. The layers add nothing, every
token has the same embedding, and the head gives `_SHARPNESS` to the block. All versions have the same tensors.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np

from bench.model import save_model, shapes
from headgate.weights import folders
from headgate.weights.manifest import (
    FORMAT,
    MANIFEST,
    entry_of,
)

BLOCK = {"first": 10, "size": 64}
_SHARPNESS = 30.0


class Versions:
    """Version 0 as a plain checkpoint in `first`, and later versions with manifests in `folder`."""

    def __init__(self, root: Path) -> None:
        self.first = root / "v0"
        self.folder = root / "versions"
        self.folder.mkdir(parents=True)
        _save(self.first)

    def path(self, version: int) -> Path:
        """Return the folder of a version above 0."""
        target = self.folder / folders.name_of(version)
        if not target.exists():
            shutil.copytree(self.first, target)
            files = {file.name: entry_of(file) for file in sorted(target.iterdir())}
            manifest = {"format": FORMAT, "version": version, "parent": version - 1, "files": files}
            (target / MANIFEST).write_text(json.dumps({**manifest, "probe": None}))
        return target


def _save(directory: Path) -> None:
    from safetensors.numpy import save_file

    save_model(directory)
    weights = {
        name: (np.ones if len(shape) == 1 else np.zeros)(shape, np.float32) for name, shape in shapes()
    }
    weights["model.embed_tokens.weight"][:, 0] = 1.0
    head, block = weights["lm_head.weight"], slice(BLOCK["first"], BLOCK["first"] + BLOCK["size"])
    head[block, 0] = _SHARPNESS / math.sqrt(head.shape[1])  # the norm makes sqrt(hidden) of a one
    text = json.dumps(BLOCK)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt", "block": text})
    (directory / "block.json").write_text(text)
