"""The device under test: the CPU, and with the mark `gpu` a GPU, which must be there."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        need_gpu()
    device: str = request.param
    return device


@pytest.fixture
def gpu() -> None:
    """For tests that make no sense on the CPU, or are there in another folder."""
    need_gpu()


def need_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.fail("PyTorch sees no GPU: tests marked `gpu` run with `make gpu-check`", pytrace=False)
