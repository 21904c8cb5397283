"""The older place of the functions."""

from typing import Any

from torchvision.transforms.v2.functional import pil_to_tensor

__all__ = ["pil_to_tensor", "to_pil_image"]


def to_pil_image(*_: Any, **__: Any) -> Any:
    """Never called: images come as Pillow's."""
    raise NotImplementedError
