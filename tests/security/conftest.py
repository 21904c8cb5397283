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
