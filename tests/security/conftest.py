"""Fixtures that several of these files use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.security.tenants import Tenants, tenants


@pytest.fixture(scope="module")
async def stage(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Tenants]:
    """Two projects on one gateway."""
    async with tenants(tiny_model, tmp_path_factory.mktemp("tenants")) as running:
        yield running


@pytest.fixture
async def own_stage(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Tenants]:
    """Two projects on a gateway that no other test has changed."""
    async with tenants(tiny_model, tmp_path / "tenants") as running:
        yield running
