"""Weights that name their version: version v samples only the ten characters of block v modulo nine, and counts them up.

Block v holds the printable characters from `!` + 10 v on, so the text that a client receives names the versions that sampled it,
and a token that is lost or doubled breaks the count. One folder serves real engines and the fake one:

- a Qwen3 checkpoint of the tiny model's shapes, so that the engine that tests share can load it; its layers add nothing. A
  token's embedding is the one-hot of its digit, whatever its block, and the head gives `SHARPNESS` to the next digit in block
  v: so a version continues the count of the version before it. Any other token counts as a nine, so a reply begins with zero.
- `block.json` (gateway.engines.fake.blocks) gives the fake engine the same samples and log-probabilities.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from gateway.engines.fake.blocks import SHARPNESS
from headgate.weights.folders import name_of
from tests.harness.models import VOCABULARY, save_tokenizer, tensors
from tests.harness.transports import finish
from tests.harness.weights import fake_adapter

BLOCK = 10
VERSIONS = 9
"""The number of blocks that printable ASCII has room for."""
_HIDDEN, _HEAD = 128, 64
ROUTERS: dict[str, Any] = {"experts": 16, "top_k": 2, "layers": [1]}
_ROUTED = {"num_experts": 16, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
"""What a config states of `ROUTERS`."""


def build(
    root: Path, versions: int = VERSIONS, transport: str = "filesystem", *, mixture: bool = False
) -> list[Path]:
    """Write versions 0 to `versions` - 1; the first is a plain checkpoint, the others have manifests.

    `mixture`: their config is that of a mixture of experts (`ROUTERS`), which fake engines alone can load.
    """
    if not 1 <= versions <= VERSIONS:
        raise ValueError(f"there are blocks for {VERSIONS} versions")
    sources, target = save_sources(root / "sources", transport, mixture=mixture), root / "versions"
    target.mkdir()
    later = [
        write_version(sources[0].parent, target, version, version - 1, transport)
        for version in range(1, versions)
    ]
    return [sources[0], *later]


def save_sources(root: Path, transport: str = "filesystem", *, mixture: bool = False) -> list[Path]:
    """Write a checkpoint for each block, and with `lora` an adapter for each."""
    sources = [root / f"block-{block}" for block in range(VERSIONS)]
    for block, source in enumerate(sources):
        save_counting(source, block, _ROUTED if mixture else {})
        if transport == "lora":
            adapter = fake_adapter(root / f"adapter-{block}", f"block {block}")
            shutil.copyfile(source / "block.json", adapter / "block.json")
    return sources


def write_version(
    sources: Path, root: Path, version: int, parent: int, transport: str = "filesystem"
) -> Path:
    """Write the published directory of a version, whole or not at all; an existing one stays as it is."""
    target = root / name_of(version)
    if target.exists():
        return target
    draft = root / f".v{version}-{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)
    kind = "adapter" if transport == "lora" else "block"
    shutil.copytree(sources / f"{kind}-{version % VERSIONS}", draft)
    before = root / name_of(parent) if parent else sources / "block-0"
    finish(transport, draft, before, version, parent, _probe(version % VERSIONS))
    draft.rename(target)
    return target


def _probe(block: int) -> dict[str, Any]:
    """Return a probe: counting through the block is certain under the version, and unlikely under its parent."""
    certain, steps = -math.log1p((VOCABULARY - 1) * math.exp(-SHARPNESS)), BLOCK - 1
    return {
        "sequences": [[*range(BLOCK * block, BLOCK * (block + 1))]],
        "new_logprobs": [[certain] * steps],
        "parent_logprobs": [[certain - SHARPNESS] * steps],
    }


def save_counting(directory: Path, block: int, more: Mapping[str, Any] | None = None) -> None:
    """Write a checkpoint that counts inside a block. `more`: keys of its config."""
    directory.mkdir(parents=True)
    save_tokenizer(directory)
    vocabulary = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab()
    if [vocabulary[chr(ord("!") + i)] for i in range(BLOCK * VERSIONS)] != [*range(BLOCK * VERSIONS)]:
        raise ValueError("the digits of all blocks are not one run of ids from 0")
    (directory / "config.json").write_text(json.dumps({**_CONFIG, **(more or {})}, indent=2))
    tokens = np.arange(BLOCK * VERSIONS)
    embedding = np.zeros((VOCABULARY, _HIDDEN), np.float32)
    embedding[:, BLOCK - 1] = 1
    embedding[tokens] = np.eye(_HIDDEN, dtype=np.float32)[tokens % BLOCK]
    head = np.zeros((VOCABULARY, _HIDDEN), np.float32)
    own = tokens[BLOCK * block : BLOCK * (block + 1)]
    head[own, (own - 1) % BLOCK] = SHARPNESS / math.sqrt(_HIDDEN)  # the norm makes sqrt(hidden) of a one
    silent = {
        name: (np.ones if name.endswith("norm.weight") else np.zeros)(shape, np.float32)
        for name, shape in tensors().items()
    }
    weights = silent | {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    value = {"first": BLOCK * block, "size": BLOCK, "digits": [0, BLOCK * VERSIONS]}
    text = json.dumps(value).ljust(64)  # of one length for all versions, because a delta needs equal headers
    (directory / "block.json").write_text(text)
    # Fake engines that receive the file alone read the block from its header.
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt", "block": text})


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
