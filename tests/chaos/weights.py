"""Weights without end that name their version: version v samples the ten digits of block v modulo nine, and counts them up.

The same folder serves the fake engine and real ones (tests/proof/models.py makes it): a reply's characters say which version, by
block, and how many tokens came before, by digit.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from gateway.engines.fake.blocks import SHARPNESS, VOCABULARY
from gateway.weights.folders import name_of
from tests.harness.transports import finish
from tests.harness.weights import fake_adapter
from tests.proof.models import BLOCK, VERSIONS, block_ids, save_counting


def save_sources(root: Path, transport: str = "filesystem") -> list[Path]:
    """A checkpoint for each block, or with `lora` an adapter; the first is version 0 and always a checkpoint."""
    sources = [root / f"block-{block}" for block in range(VERSIONS)]
    for block, source in enumerate(sources):
        save_counting(source, block)
        ids = block_ids(source, block)
        if ids != list(range(BLOCK * block, BLOCK * (block + 1))):
            raise ValueError("the digits of all blocks are one run of ids")
        value = json.dumps({"first": ids[0], "size": BLOCK, "digits": [0, BLOCK * VERSIONS]})
        (source / "block.json").write_text(value)
        _name_block(source / "model.safetensors", value)
        if transport == "lora":
            adapter = fake_adapter(root / f"adapter-{block}", f"block {block}")
            shutil.copyfile(source / "block.json", adapter / "block.json")
    return sources


def _name_block(file: Path, block: str) -> None:
    """Names the block in the file too, for fake engines that are sent the file alone."""
    save_file(load_file(file), file, metadata={"format": "pt", "block": block})


def write_version(
    sources: Path, root: Path, version: int, parent: int, transport: str = "filesystem"
) -> Path:
    """The published directory of a version, whole or not at all; one that is there already stays as it is."""
    target = root / name_of(version)
    if target.exists():
        return target
    draft = root / f".v{version}-{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)
    kind = "adapter" if transport == "lora" else "block"
    shutil.copytree(sources / f"{kind}-{version % VERSIONS}", draft)
    block = list(range(BLOCK * (version % VERSIONS), BLOCK * (version % VERSIONS + 1)))
    certain = -math.log1p((VOCABULARY - 1) * math.exp(-SHARPNESS))
    steps = len(block) - 1
    probe = {
        "sequences": [block],
        "new_logprobs": [[certain] * steps],
        "parent_logprobs": [[certain - SHARPNESS] * steps],
    }
    before = root / name_of(parent) if parent else sources / "block-0"
    finish(transport, draft, before, version, parent, probe)
    draft.rename(target)
    return target
