"""Parent plus delta is the new version to the bit. Files are written by safetensors; the truth are their bytes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from headgate.weights import delta
from headgate.weights.tensors import Malformed

KINDS = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.float8_e4m3fn]


def folders(work: Path, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> tuple[Path, Path]:
    for name, tensors in (("old", old), ("new", new)):
        (work / name).mkdir(parents=True)
        save_file(tensors, work / name / "model.safetensors")
    return work / "old", work / "new"


def restored(work: Path, old: Path) -> bytes:
    shutil.copytree(old, work / "copy")
    delta.apply(work / "delta", work / "copy")
    return (work / "copy" / "model.safetensors").read_bytes()


def bits(kind: torch.dtype, numbers: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(numbers.copy()).view(kind)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(KINDS), st.integers(0, 2**32 - 1), st.integers(1, 2000), st.floats(0, 1), st.booleans()
)
def test_any_bits_become_any_others(
    tmp_path_factory: pytest.TempPathFactory,
    kind: torch.dtype,
    seed: int,
    count: int,
    share: float,
    small: bool,
) -> None:
    """NaN, infinities and denormals among them; changes by one unit, or to anything."""
    random, work = np.random.default_rng(seed), tmp_path_factory.mktemp("delta")
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[kind.itemsize]
    before = random.integers(0, 2 ** (8 * kind.itemsize) - 1, count, unsigned, endpoint=True)
    steps = random.choice([1, -1], count).astype(unsigned) if small else random.permutation(before)
    after = np.where(random.random(count) < share, before + steps, before)
    same = torch.arange(7)
    old, new = folders(
        work, {"a": bits(kind, before), "same": same}, {"a": bits(kind, after), "same": same.clone()}
    )
    assert delta.write(work / "delta", old, new)
    assert restored(work, old) == (new / "model.safetensors").read_bytes()


def test_elements_that_are_far_apart(tmp_path: Path) -> None:
    before = np.zeros(200_000, np.uint16)
    after = before.copy()
    after[[0, 254, 255, 510, 511, 767, 100_000, 199_999]] = 7
    old, new = folders(tmp_path, {"a": bits(torch.bfloat16, before)}, {"a": bits(torch.bfloat16, after)})
    assert delta.write(tmp_path / "delta", old, new)
    assert restored(tmp_path, old) == (new / "model.safetensors").read_bytes()
    assert (tmp_path / "delta").stat().st_size < 2000


def test_a_step_that_changes_few_bits_is_small(tmp_path: Path) -> None:
    """3 % of a million bfloat16 numbers go up or down by one unit."""
    random = np.random.default_rng(0)
    before = (
        torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
        .bfloat16()
        .view(torch.uint16)
        .numpy()
    )
    steps = random.choice(np.array([1, 2**16 - 1], np.uint16), len(before))
    after = np.where(random.random(len(before)) < 0.03, before + steps, before)
    old, new = folders(tmp_path, {"a": bits(torch.bfloat16, before)}, {"a": bits(torch.bfloat16, after)})
    assert delta.write(tmp_path / "delta", old, new)
    assert restored(tmp_path, old) == (new / "model.safetensors").read_bytes()
    assert (tmp_path / "delta").stat().st_size < 0.02 * 2 * len(before)


@pytest.mark.parametrize(
    "other",
    [
        {"b": torch.ones(3)},
        {"a": torch.ones(4)},
        {"a": torch.ones(3).bfloat16()},
        {"a": torch.ones(3), "b": torch.ones(1)},
    ],
)
def test_versions_whose_tensors_differ_have_none(tmp_path: Path, other: dict[str, torch.Tensor]) -> None:
    old, new = folders(tmp_path, other, {"a": torch.ones(3)})
    assert not delta.write(tmp_path / "delta", old, new)
    assert not (tmp_path / "delta").exists()


def test_what_is_no_delta_of_the_files_is_refused(tmp_path: Path) -> None:
    old, new = folders(tmp_path / "w", {"a": torch.zeros(9)}, {"a": torch.ones(9)})
    assert delta.write(tmp_path / "delta", old, new)
    small, _ = folders(tmp_path / "small", {"a": torch.zeros(3)}, {"a": torch.zeros(3)})
    other, _ = folders(tmp_path / "other", {"b": torch.zeros(9)}, {"b": torch.zeros(9)})
    for folder in (small, other):
        with pytest.raises(Malformed, match="is not a delta of"):
            delta.apply(tmp_path / "delta", folder)
    for content in (b"", b"PK\3\4", np.array([1, 2]).tobytes()):
        (tmp_path / "delta").write_bytes(content)
        with pytest.raises(Malformed, match="is not a delta of"):
            delta.apply(tmp_path / "delta", old)
