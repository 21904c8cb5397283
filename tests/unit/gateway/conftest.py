"""The tiny model's tokenizer and template, read once."""

from __future__ import annotations

import pytest

from gateway.config import ModelSettings
from gateway.render.renderer import ChatRenderer
from tests.harness.models import save_tokenizer


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return ChatRenderer.load(ModelSettings(path=directory))
