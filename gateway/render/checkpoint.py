"""A checkpoint's tokenizer, from its files: token ids, special tokens by name, chat templates.

Returns what `transformers.AutoTokenizer` returns, without that library: its import takes a second and, where torch is installed,
200 MiB. `AutoTokenizer` takes most tokenizers as their `tokenizer.json` has them; for some classes it builds its own from the
vocabulary (`tokenizer_class`). Where that differs, and where there is no `tokenizer.json`, transformers itself is used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from gateway.render.tokenizer_class import tokens_of
from headgate.extras import install_command

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ELSEWHERE = {"auto_map", "fast_tokenizer_files"}
"""Keys of a configuration that mean that another file, or a program, is the tokenizer."""


class NeedsTransformers(ValueError):
    """A tokenizer that only transformers can read, which is not installed."""


class Checkpoint:
    """A tokenizer with its special tokens and templates. Nothing in it changes."""

    def __init__(
        self,
        backend: Tokenizer,
        name: str,
        special: dict[str, str],
        chat_template: str | dict[str, str] | None,
    ) -> None:
        self.backend_tokenizer = backend
        self.name_or_path = name
        self.special_tokens_map = special
        self.chat_template = chat_template
        """The template, or several by name."""

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Read a checkpoint's folder. Raise NeedsTransformers, and whatever the files' readers raise."""
        config, model = _json(folder / "tokenizer_config.json"), _json(folder / "config.json")
        spec = _json(folder / "tokenizer.json")
        tokens = None if not spec or config.keys() & _ELSEWHERE else tokens_of(config, model, spec)
        if tokens is None:
            return _by_transformers(folder, config)
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
        special = _add_tokens(backend, folder, tokens | config)
        return cls(backend, str(folder), special, _chat_template(folder, config))

    def template(self, tools: bool) -> str:
        """Return the template for conversations with tools or without. Raise ValueError if the checkpoint has none."""
        found = self.chat_template
        if isinstance(found, dict):
            found = (found.get("tool_use") if tools else None) or found.get("default")
        if not found:
            raise ValueError("the checkpoint has no chat template: set `family` to one of the known families")
        return found

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return the id of a token, or those of several; the unknown token's, or None, for one that is not there."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self.backend_tokenizer.token_to_id(tokens)
        return self.unk_token_id if found is None else found

    @property
    def eos_token_id(self) -> int | None:
        """The id of the end of a sequence."""
        return self._id_of("eos_token")

    @property
    def unk_token_id(self) -> int | None:
        """The id of the token for unknown text."""
        return self._id_of("unk_token")

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.backend_tokenizer.token_to_id(token)

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))


def has_images(folder: Path) -> bool:
    """Return whether a checkpoint's configuration has a vision model."""
    config = _json(folder / "config.json")
    return any(config.get(key) is not None for key in ("vision_config", "vision_tower", "image_token_id"))


def _add_tokens(backend: Tokenizer, folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Add the tokens that the configuration has and the vocabulary lacks, as transformers does; return those with names."""
    if "added_tokens_decoder" not in config:  # a folder in the form of before 2023
        config = config | _json(folder / "special_tokens_map.json")
    named, extra = _special(config)
    texts = {token.content for token in (*named.values(), *extra)}
    listed = _listed(folder, config, texts)
    adding = [listed[number] for number in sorted(listed)]
    known = {token.content for token in (*backend.get_added_tokens_decoder().values(), *adding)}
    for token in (*named.values(), *extra):
        if token.content not in known:
            adding.append(token)
            known.add(token.content)
    for token in adding:
        token.special = token.special or token.content in {one.content for one in named.values()}
    backend.add_tokens(adding)
    return {name: token.content for name, token in named.items()}


def _special(config: dict[str, Any]) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """Return the special tokens with names, and those without."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    names = [*_NAMED, *(key for key in config if key.endswith("_token") and key not in _NAMED)]
    named = {name: _token(config[name]) for name in names if isinstance(config.get(name), str | dict)}
    if isinstance(extra, dict):
        return named | {name: _token(value) for name, value in extra.items()}, []
    return named, [_token(value) for value in extra]


def _listed(folder: Path, config: dict[str, Any], special: set[str]) -> dict[int, AddedToken]:
    """Return the added tokens by their ids."""
    if "added_tokens_decoder" in config:
        return {int(number): _token(value) for number, value in config["added_tokens_decoder"].items()}
    return {
        number: AddedToken(text, normalized=text not in special, special=text in special)
        for text, number in _json(folder / "added_tokens.json").items()
    }


def _token(value: str | dict[str, Any]) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True)
    return AddedToken(**{key: item for key, item in value.items() if key != "__type"})


def _chat_template(folder: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """Return the templates: those in files of their own come before those in the configuration."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    found = {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
    if found:
        return found["default"] if found.keys() == {"default"} else found
    template = config.get("chat_template")
    return {one["name"]: one["template"] for one in template} if isinstance(template, list) else template


def _by_transformers(folder: Path, config: dict[str, Any]) -> Checkpoint:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        what = config.get("tokenizer_class") or "a tokenizer without tokenizer.json"
        raise NeedsTransformers(
            f"{what} can only be read by transformers: {install_command('trainer')}, or save the tokenizer in another folder"
            " where that is installed (AutoTokenizer.from_pretrained(...).save_pretrained(...)) and name PreTrainedTokenizerFast"
            " as its tokenizer_class"
        ) from error
    made = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    return Checkpoint(
        made.backend_tokenizer, made.name_or_path, dict(made.special_tokens_map), made.chat_template
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
