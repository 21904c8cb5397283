"""`gateway serve --demo`: a checkpoint that is made in a moment, and settings for a fake engine that serves it.

The engine draws tokens by a hash, so its replies are random words. Everything else is what a real model gets: the same API,
the same record, the same rewards. Nothing is downloaded and nothing is trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MODEL = "demo"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""The marks of the `qwen3` family."""
WORDS = """
    a about above across after again air all along always among an and any apple around as at away back bank barley be
    bed been before bell below bend bench between bird blue board boat both branch bread bridge bright bring broad
    brook brown build but by call calm carry chain clay clear cloud cold come corn course cross current dam dark day
    deep ditch down draw drop dry dusk each early earth east eel end even every fall far farm fast fern few field find
    fish flat flood floor flour flow foam for ford free from full gate gear gentle give go grain grass gravel gray green
    ground half hand hard have hay heavy heron high hill hold home house in is island it its iron keep lake land large
    last late lay leaf leave level life lift light like line little load long low make many may meadow mill miller mist
    moon moss most move mud narrow near never new next night no north not now oak oar of off oil old on once one only
    open or other otter our out over own past path peace pebble place plain plank point pond pool quiet race rain reach
    red reed rest ride ripple rise river road rock roof rope round run rye sack salt sand see seed set shade shallow
    shore side silver slow small smooth snow so soft some south spring stand star stay steady steel stem still stone
    stream sun swan swift tall the there tide to turn under wall warm water
"""
"""The words that the engine's 256 ordinary tokens stand for."""
CONTEXT = 262_144
"""The prompt of a coding agent has 50 kB or more, and a token here is one byte of it."""
_WIDTH = 16
"""The width of the only tensor, which no model computes with."""


def demo_settings(folder: Path, port: int) -> dict[str, Any]:
    """Return the configuration, as TOML would give it, and write the checkpoint; all files are in `folder`."""
    model = folder / "model"
    save_checkpoint(model)
    served = {
        "path": str(model),
        "family": "qwen3",
        "aliases": ["*"],
        "thinking": False,
        "max_model_len": CONTEXT,
    }
    return {
        "server": {"port": port},
        "models": {MODEL: served},
        "engine": {"launch": "fake", "args": ["--delay-s", "0.02"], "log": str(folder / "engine.log")},
        # Nothing is trained here, so no episode may wait for a batch.
        "staleness": {"eta": 64, "batch": 1024},
        "store": {"url": f"sqlite:///{folder / 'gateway.db'}"},
        "control": {"recording": str(folder / "control.jsonl")},
    }


def save_checkpoint(folder: Path) -> None:
    """Write a tokenizer, a configuration and one tensor of zeros. Text is encoded byte by byte."""
    import numpy as np
    from safetensors.numpy import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*(f"Ġ{word}" for word in WORDS.split()), *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in MARKS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"model_type": "qwen3", "vocab_size": tokenizer.get_vocab_size(), "hidden_size": _WIDTH}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    embeddings = np.zeros((tokenizer.get_vocab_size(), _WIDTH), np.float32)
    save_file({"model.embed_tokens.weight": embeddings}, folder / "model.safetensors")


def introduction(folder: Path, url: str) -> str:
    """Return a text about what a person can do with the demo, and how to continue with a model; all files are in `folder`."""
    where = "" if url.endswith(":8000") else f" --gateway {url}"
    return "\n".join([
        f"A fake engine replies at {url}/v1 with random words; every token is recorded. Files: {folder}/",
        f"Next:   gateway episodes run --tasks tasks.jsonl{where} -- python my_agent.py",
        "        runs your agent once per episode, with a base URL and key of its own in its environment (README).",
        f"Look:   {url}/console shows each episode as it happens.",
        "Train:  gateway init   writes run.toml for your model and agent.",
    ])  # fmt: skip
