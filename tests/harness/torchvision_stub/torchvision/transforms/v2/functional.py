"""Stand-ins for the functions of torchvision that a processor of images calls; each takes tensors of images and returns them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode", "normalize", "pil_to_tensor", "resize", "to_tensor"]


def pil_to_tensor(image: Any) -> Tensor:
    """Shape (channels, height, width), as bytes."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def to_tensor(image: Any) -> Tensor:
    """Return the same from 0 to 1."""
    return pil_to_tensor(image).float() / 255


def resize(
    image: Tensor,
    size: list[int],
    interpolation: InterpolationMode = InterpolationMode.BILINEAR,
    max_size: int | None = None,
    antialias: bool | None = True,
) -> Tensor:
    """Round where the image has bytes, as torchvision does."""
    assert max_size is None
    pixels = image.float() if image.dtype == torch.uint8 else image
    batch = pixels.reshape(-1, *pixels.shape[-3:])
    found = torch.nn.functional.interpolate(
        batch, size=list(size), mode=interpolation.value, align_corners=False, antialias=bool(antialias)
    ).reshape(*image.shape[:-2], *size)
    return found.clamp(0, 255).round().to(torch.uint8) if image.dtype == torch.uint8 else found


def normalize(image: Tensor, mean: Any, std: Any, inplace: bool = False) -> Tensor:
    """Per channel."""
    mean, std = (torch.as_tensor(values, dtype=image.dtype).reshape(-1, 1, 1) for values in (mean, std))
    return (image - mean) / std
