"""Models that see: which parts they see with, and the Qwen-VL family's forward pass over tokens among which images stand.

The model's own code places the images' features and numbers positions in three dimensions; its own processor makes an image's
patches of a file. Owns the images that were read last.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoImageProcessor

from trainer.data.images import ImageSupport
from trainer.errors import ConfigError

MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""The `model_type`s that are given images, the same as in the gateway."""
_REMEMBERED = 64


class VisionInputs:
    """What one model is given of images; `of` makes it."""

    def __init__(self, processor: Any, read: Callable[[str], bytes], placeholder: int, merge: int) -> None:
        """`read`: an image's file, by its hash. `merge`: patches on a side of what one token stands for."""
        self.image_support = ImageSupport(placeholder)
        self._processor = processor
        self._read = read
        self._merge = merge
        # The members of a group mostly see the same images.
        self._patches = lru_cache(_REMEMBERED)(self._processed)

    @classmethod
    def of(cls, path: Path, read: Callable[[str], bytes]) -> VisionInputs | None:
        """Return the inputs of a checkpoint; None if its model accepts no images or cannot be loaded. Raise ConfigError."""
        try:
            config = AutoConfig.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError):
            return None  # loading the model reports why
        if config.model_type not in MODELS:
            return None
        try:
            processor = AutoImageProcessor.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            why = str(error).strip().splitlines()[0]
            raise ConfigError(f"[model] path = {str(path)!r}: its images cannot be read: {why}") from error
        return cls(processor, read, config.image_token_id, config.vision_config.spatial_merge_size)

    def tokens(self, name: str) -> int:
        """Return the number of tokens that stand for an image. Raise ValueError if it cannot be read as an image."""
        _, grid = self._patches(name)
        return int(grid.prod()) // self._merge**2

    def hidden(self, model: Any, ids: Tensor, names: Sequence[str]) -> Tensor:
        """Return the last hidden states of one path, shape (tokens, width). `names`: the hashes of its images, in order."""
        patches, grids = zip(*map(self._patches, names), strict=True)
        found: Tensor = model.base_model(
            input_ids=ids[None],
            pixel_values=torch.cat(patches).to(ids.device),
            image_grid_thw=torch.cat(grids).to(ids.device),
            mm_token_type_ids=(ids == self.image_support.placeholder).int()[None],
            use_cache=False,
        ).last_hidden_state[0]
        return found

    def _processed(self, name: str) -> tuple[Tensor, Tensor]:
        """Return an image's patches, shape (patches, numbers), and how many there are by time, height and width, shape (1, 3)."""
        # For runs with images alone.
        from PIL import Image

        data = self._read(name)
        try:
            with Image.open(io.BytesIO(data)) as picture:
                found = self._processor(picture.convert("RGB"), return_tensors="pt")
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise ValueError(str(error)) from error
        return found["pixel_values"], found["image_grid_thw"]


def freeze(model: Any, how: Literal["frozen", "trained"]) -> None:
    """Freeze a model's vision and audio towers, unless they are trained."""
    if how == "frozen":
        for part in towers(model).values():
            part.requires_grad_(False)


def towers(model: Any) -> dict[str, nn.Module]:
    """Return the parts of a model that text alone never passes: towers for images and sound, and what leads from them.

    They are named within the model that has a head. Found by what they are, for each family has names of its own: the parts of a
    composite model other than its decoder.
    """
    base, decoder = model.base_model, model.get_decoder()
    if model.config.get_text_config() is model.config or base is decoder:
        return {}
    return {name: part for name, part in base.named_children() if decoder not in part.modules()}
