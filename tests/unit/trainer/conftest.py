"""Fixtures of the trainer's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.harness.gateways import RunningGateway, run_gateway, settings_for


@pytest.fixture(autouse=True)
def _torch_is_left_as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def exact_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that computes in float64 throughout; the tiny Qwen3 normalizes in float32 whatever its weights are."""
    directory = tmp_path_factory.mktemp("models") / "gpt2"
    torch.manual_seed(5)
    config = GPT2Config(
        vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(directory)
    return directory


@pytest.fixture
async def gateway(tiny_model: Path, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """A gateway whose fake engine loads the versions of a real trainer; batches of two groups, eta 1."""
    staleness = {"batch": 2, "eta": 1, "min_members": 1}
    async with run_gateway(
        settings_for(tiny_model, tmp_path, staleness=staleness, update={"probe": False})
    ) as running:
        yield running
