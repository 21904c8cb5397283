"""The class of a checkpoint's tokenizer by the rules of transformers' `AutoTokenizer`, and whether it is its `tokenizer.json`.

Most classes take the tokenizer as `tokenizer.json` has it. Some take the vocabulary alone and build the rest: those classes that
are known here (`_BUILT`) are compared with the file; only transformers can check the others.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_FILE = ("", "PreTrainedTokenizer", "TokenizersBackend", "PythonBackend")
"""Names of classes that take the tokenizer as the file has it."""
_FILE_TYPES = (
    *("glm", "glm4", "glm4_moe", "glm4_moe_lite", "granite", "granitemoe", "granitemoehybrid", "kimi_k25", "kimi_linear"),
    *("mimo_v2_flash", "minimax_m2", "ministral", "ministral3", "mistral", "mistral3", "mixtral", "olmo2", "olmo3", "phi3"),
    "phimoe",
)  # fmt: skip
"""Types of models whose file counts whatever class their configuration names."""
_QWEN2 = (
    "qwen2",
    "qwen2_5_vl",
    "qwen2_moe",
    "qwen2_vl",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl",
    "qwen3_vl_moe",
)
_QWEN3_5 = ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text")
_GEMMA = ("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text")
OWN = {
    **dict.fromkeys(_QWEN2, "Qwen2Tokenizer"),
    **dict.fromkeys(_QWEN3_5, "Qwen3_5Tokenizer"),
    **dict.fromkeys(_GEMMA, "GemmaTokenizer"),
}
"""The classes of types of models that have one of their own."""
_ALWAYS_OWN = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")
"""Types of models whose own class counts although their configuration names another."""


@dataclass(frozen=True)
class _Built:
    """The parts that a tokenizer class adds to a vocabulary, as in `tokenizer.json`, and its default special tokens."""

    normalizer: dict[str, Any]
    pre_tokenizer: dict[str, Any]
    decoder: dict[str, Any]
    model: dict[str, Any]
    tokens: dict[str, str]

    def equals(self, spec: dict[str, Any]) -> bool:
        """Return whether a `tokenizer.json` has the same."""
        around = _without_offsets([spec.get("normalizer"), spec.get("pre_tokenizer")])
        decoder = spec.get("decoder") or {}
        decoder = {"type": "ByteLevel"} if decoder.get("type") == "ByteLevel" else decoder
        model = {key: spec["model"].get(key) or None for key in self.model}
        wanted = (self.model, [self.normalizer, self.pre_tokenizer], self.decoder)
        return (model, around, decoder) == wanted


def _qwen(words: str) -> _Built:
    split = {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}
    letters = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return _Built(
        {"type": "NFC"},
        {"type": "Sequence", "pretokenizers": [split, letters]},
        {"type": "ByteLevel"},
        dict.fromkeys(("unk_token", "fuse_unk", "byte_fallback", "ignore_merges", "dropout")),
        dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
    )


_REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?"
_GEMMA_PARTS = _Built(
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
    {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ],
    },
    {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "ignore_merges": None, "dropout": None},
    {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "pad", "mask")},
)
_BUILT = {
    "Qwen2Tokenizer": _qwen(_SHORT + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _REST),
    "Qwen3_5Tokenizer": _qwen(_SHORT + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _REST),
    "GemmaTokenizer": _GEMMA_PARTS,
}


def tokens_of(config: dict[str, Any], model: dict[str, Any], spec: dict[str, Any]) -> dict[str, str] | None:
    """Return the special tokens that a checkpoint has in addition to the named ones; None where its `tokenizer.json` is not all
    of it.

    `config`, `model` and `spec` are its `tokenizer_config.json`, `config.json` and `tokenizer.json`.
    """
    name = _class(config, model, spec)
    if name in _FILE:
        return {}
    built = _BUILT.get(name)
    return built.tokens if built is not None and built.equals(spec) else None


def _class(config: dict[str, Any], model: dict[str, Any], spec: dict[str, Any]) -> str:
    kind = str(model.get("model_type") or "")
    name = str(config.get("tokenizer_class") or model.get("tokenizer_class") or "").removesuffix("Fast")
    if kind in _FILE_TYPES:
        return ""
    if kind in _ALWAYS_OWN or (kind in OWN and not name):
        return OWN[kind]
    byte_level = "ByteLevel" in json.dumps([spec.get("pre_tokenizer"), spec.get("decoder")])
    return "" if name == "LlamaTokenizer" and byte_level else name


def _without_offsets(parts: list[Any]) -> Any:
    """Return the parts without the settings that only locate a token in a text."""

    def without_offsets(value: dict[str, Any]) -> dict[str, Any]:
        return {key: item for key, item in value.items() if key != "trim_offsets"}

    return json.loads(json.dumps(parts), object_hook=without_offsets)
