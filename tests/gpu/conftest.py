"""The device under test: the CPU, and with the mark `gpu` a GPU, which must be there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """torch's compiler reads `.grad` of tensors that are not leaves, and fails by its own warning where that is an error."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cuda":
        need_gpu()
    yield request.param
    # Its process group has a backend for GPUs, which one that was made for the CPU has not.
    if request.param == "cuda" and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def gpu() -> None:
    """For tests that make no sense on the CPU, or are there in another folder."""
    need_gpu()


def need_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.fail("PyTorch sees no GPU: tests marked `gpu` run with `make bench NAME=gpu`", pytrace=False)
