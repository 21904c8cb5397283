"""Checks that the folder of a model is a checkpoint, before anything in it is read."""

from __future__ import annotations

from pathlib import Path

from gateway.config import ModelSettings
from gateway.config.settings import ConfigError

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
"""A checkpoint has one of these at least."""


def check_model(name: str, model: ModelSettings, *, loaded: bool = False) -> None:
    """Raise ConfigError for a folder that is not a checkpoint's; reads no file.

    `loaded`: an engine is going to load the model from there. An engine elsewhere needs only its tokenizer here.
    """
    where = f"[models.{name}]"
    assert model.path is not None
    if not model.path.is_dir():
        raise ConfigError(
            f"{where} path = {str(model.path)!r}: no such folder (relative paths are taken from the folder of the start):"
            f" `hf download ORGANIZATION/MODEL --local-dir {model.path}` downloads a checkpoint from Hugging Face"
        )
    if lost := _dangling(model.path):
        raise ConfigError(
            f"{where} path = {str(model.path)!r}: {lost} is a link to a file that is not here, as in a snapshot of Hugging"
            " Face's cache that was mounted alone: `hf download MODEL --local-dir FOLDER` writes the files themselves"
        )
    missing = "config.json" if loaded and not (model.path / "config.json").is_file() else ""
    if not any((model.path / file).is_file() for file in _TOKENIZERS):
        missing = "tokenizer.json"
    if missing:
        raise ConfigError(
            f"{where} path = {str(model.path)!r}: this folder has no {missing}: name the folder of a checkpoint in Hugging Face's"
            " form, with its config, tokenizer and weights"
        )


def _dangling(folder: Path) -> str:
    """Return the name of a link in a folder that leads nowhere, or nothing."""
    return next(
        (file.name for file in sorted(folder.iterdir()) if file.is_symlink() and not file.exists()), ""
    )
