"""Weights that name their version: version v samples only the ten characters of block v, and counts them up, token by token.

Block v holds the printable characters from `!` + 10 v on, so the text that a client receives says what was sampled by which
version, and a token that is lost or doubled breaks the count. Two makes of the same weights:

- for the fake engine a folder with `block.json`: a token's digit is its position, modulo ten;
- for real engines a Qwen3 checkpoint of the tiny model's shapes, so that the engine that tests share can load it; its layers
  add nothing. A token's embedding is the one-hot of its digit, whatever its block, and the head gives `SHARPNESS` to the next
  digit in block v: so a version goes on counting where the one before it stopped. Any other token counts as a nine, so a reply
  begins with zero.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from gateway.engines.fake import identity, token_logprob
from gateway.weights.folders import name_of
from tests.harness.models import VOCABULARY, save_tokenizer, tensors
from tests.harness.transports import finish
from tests.harness.weights import fake_adapter, fake_weights
from tests.proof.checker import Code

BLOCK = 10
VERSIONS = 9
"""The number of blocks that printable ASCII has room for."""
SHARPNESS = 30.0
"""The logit of the right token; all others have none. Nothing else is ever sampled: its chance is 272 / e^30."""
FIRST = 0
"""The id of the first digit of version 0."""
_HIDDEN, _HEAD = 128, 64


@dataclass(frozen=True, slots=True)
class Family:
    """Published versions of one model, and how to read what they sample."""

    paths: list[Path]
    """The directories by version; the first is a plain checkpoint, the others have manifests."""
    code: Code


def build(root: Path, engine: str, versions: int = VERSIONS, transport: str = "filesystem") -> Family:
    """Writes versions 0 to `versions` - 1 for an engine, `fake` or `vllm`, and a way in which they travel."""
    if not 1 <= versions <= VERSIONS:
        raise ValueError(f"there are blocks for {VERSIONS} versions")
    paths: list[Path] = []
    blocks: list[list[int]] = []
    for version in range(versions):
        source = root / f"source-{version}"
        save = _save_adapter if transport == "lora" and version else _save_fake
        (save if engine == "fake" else save_counting)(source, version)
        blocks.append(block_ids(source, version))
        if version == 0:
            paths.append(source)
            continue
        probe = (_fake_probe if engine == "fake" else _counting_probe)(source, paths[-1], blocks[-1])
        target = root / "versions" / name_of(version)
        shutil.copytree(source, target)
        finish(transport, target, paths[-1], version, version - 1, probe)
        paths.append(target)
    characters = {chr(_first(v) + d): blocks[v][d] for v in range(versions) for d in range(BLOCK)}
    return Family(paths, Code(blocks, characters, by_position=engine == "fake"))


def block_ids(directory: Path, version: int) -> list[int]:
    """The token ids of a version's block, by digit."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[chr(_first(version) + digit)] for digit in range(BLOCK)]


def save_counting(directory: Path, version: int) -> None:
    """A Qwen3 checkpoint that counts inside a version's block."""
    directory.mkdir(parents=True)
    save_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps(_CONFIG, indent=2))
    weights = _silent()
    embedding = np.zeros((VOCABULARY, _HIDDEN), np.float32)
    embedding[:, BLOCK - 1] = 1
    for block in range(VERSIONS):
        for digit, token in enumerate(block_ids(directory, block)):
            embedding[token] = np.eye(_HIDDEN, dtype=np.float32)[digit]
    head = np.zeros((VOCABULARY, _HIDDEN), np.float32)
    for digit, token in enumerate(block_ids(directory, version)):
        head[token, (digit - 1) % BLOCK] = SHARPNESS / math.sqrt(
            _HIDDEN
        )  # the norm makes sqrt(hidden) of a one
    weights |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _first(version: int) -> int:
    return ord("!") + BLOCK * version


def _save_fake(directory: Path, version: int) -> None:
    block = _block(version)
    fake_weights(directory, f"version {version}", block)
    _name_block(directory, version, block)


def _block(version: int) -> str:
    """Of one length for all versions, for a delta needs headers alike."""
    return json.dumps({"first": FIRST + BLOCK * version, "size": BLOCK}).ljust(32)


def _save_adapter(directory: Path, version: int) -> None:
    fake_adapter(directory, f"version {version}")
    _name_block(directory, version, _block(version))


def _name_block(directory: Path, version: int, block: str) -> None:
    save_tokenizer(directory)
    ids = block_ids(directory, version)
    if ids != list(range(FIRST + BLOCK * version, FIRST + BLOCK * (version + 1))):
        raise ValueError("the fake engine's blocks are runs of ids")
    (directory / "block.json").write_text(block)


def _fake_probe(new: Path, parent: Path, block: Sequence[int]) -> dict[str, Any]:
    def says(weights: Path) -> list[float]:
        return [token_logprob(identity(str(weights)), before, token) for before, token in pairwise(block)]

    return {"sequences": [list(block)], "new_logprobs": [says(new)], "parent_logprobs": [says(parent)]}


def _counting_probe(_new: Path, _parent: Path, block: Sequence[int]) -> dict[str, Any]:
    """Counting through the new block is certain under the new version, and as unlikely as anything else under its parent."""
    certain = -math.log1p((VOCABULARY - 1) * math.exp(-SHARPNESS))
    steps = len(block) - 1
    return {
        "sequences": [list(block)],
        "new_logprobs": [[certain] * steps],
        "parent_logprobs": [[certain - SHARPNESS] * steps],
    }


def _silent() -> dict[str, Any]:
    """Norms that change nothing, and layers that add nothing."""
    return {
        name: (np.ones if name.endswith("norm.weight") else np.zeros)(shape, np.float32)
        for name, shape in tensors().items()
    }


_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "float32",
    "vocab_size": VOCABULARY,
    "hidden_size": _HIDDEN,
    "intermediate_size": 2 * _HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": _HIDDEN // _HEAD,
    "num_key_value_heads": _HIDDEN // _HEAD,
    "head_dim": _HEAD,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
