"""Images in prompts, for the models of the Qwen-VL family: how many tokens stand for one, and which tokens. Pure computation.

Such a model's template writes `<|vision_start|><|image_pad|><|vision_end|>` for an image, and the engine's processor repeats the
middle token as often as the image has patches after it was resized. The gateway does the same from the image's width and height,
so that a prompt is made without an engine; the engine refuses a request whose images it counts differently.

Between rendering and recording the tokens of an image are its *key*, negative numbers from its hash: two prompts with different
images never look alike, though the engine is given the same placeholders for both.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headgate.types import ImageSpan, Int32Array

MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""The `model_type`s whose placeholders are known here."""
_WORDS = 8
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 28 * 28 * 1280


@dataclass(frozen=True, slots=True)
class Vision:
    """How one model's processor turns images into tokens."""

    start: int
    pad: int
    """The token that is repeated."""
    end: int
    patch: int
    merge: int
    min_pixels: int
    max_pixels: int

    @classmethod
    def read(cls, folder: Path) -> Vision:
        """Read a checkpoint's folder. Raise ValueError if its model is none of the family's."""
        config = _json(folder / "config.json")
        if config.get("model_type") not in MODELS or not isinstance(config.get("vision_config"), dict):
            raise ValueError(
                f"images = true: its model is a {config.get('model_type', 'model without config.json')!r}, and placeholders are"
                f" known of {', '.join(MODELS)}"
            )
        given = _json(folder / "preprocessor_config.json")
        size = given.get("size") or {}
        vision = config["vision_config"]
        return cls(
            start=config["vision_start_token_id"],
            pad=config["image_token_id"],
            end=config["vision_end_token_id"],
            patch=given.get("patch_size") or vision["patch_size"],
            merge=given.get("merge_size") or vision["spatial_merge_size"],
            min_pixels=given.get("min_pixels") or size.get("shortest_edge") or _MIN_PIXELS,
            max_pixels=given.get("max_pixels") or size.get("longest_edge") or _MAX_PIXELS,
        )

    def tokens(self, width: int, height: int) -> int:
        """Return the number of placeholders of an image."""
        rows, columns = self._resized(height, width)
        return (rows // self.patch) * (columns // self.patch) // self.merge**2

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the size to which the processor brings an image (`smart_resize` of transformers)."""
        unit = self.patch * self.merge
        rows, columns = round(height / unit) * unit, round(width / unit) * unit
        if rows * columns > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(unit, math.floor(height / shrink / unit) * unit)
            columns = max(unit, math.floor(width / shrink / unit) * unit)
        elif rows * columns < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows = math.ceil(height * grow / unit) * unit
            columns = math.ceil(width * grow / unit) * unit
        return rows, columns


class ImageMarks:
    """Marks in the text of one model's template where an image stands. The word that they begin with is secret."""

    def __init__(self, vision: Vision) -> None:
        self.vision = vision
        self._word = f"{secrets.token_hex(8)}i"
        self._mark = re.compile(rf"{self._word}([0-9a-f]{{64}}):([0-9]+);")

    def text_of(self, part: dict[str, Any]) -> str:
        return f"{self._word}{part['image']}:{self.vision.tokens(part['width'], part['height'])};"

    def encode(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Return the ids of a text by `encode`, with the marks of the vision and the key of each image in their places."""
        if self._word not in text:
            return encode(text)
        ids: list[int] = []
        pieces = self._mark.split(text)
        for part, name, count in zip(pieces[::3], [*pieces[1::3], ""], [*pieces[2::3], "0"], strict=True):
            ids += encode(part) if part else []
            if name:
                ids += [self.vision.start, *key(name, int(count)).tolist(), self.vision.end]
        return ids


def key(name: str, length: int) -> Int32Array:
    """Return the key of an image of `count` tokens: negative numbers from its hash."""
    words = np.frombuffer(bytes.fromhex(name), "<u4", _WORDS) & 0x7FFFFFFF
    return np.resize(-1 - words.astype(np.int64), length).astype(np.int32)


def keyed(ids: Int32Array, images: Iterable[ImageSpan]) -> Int32Array:
    """Return token ids with each image's key in place of its placeholders."""
    found = ids
    for image in images:
        found = found.copy() if found is ids else found
        found[image.offset : image.offset + image.length] = key(image.hash, image.length)
    return found


def unkeyed(
    found: Int32Array, names: Iterable[str], vision: Vision | None
) -> tuple[Int32Array, tuple[ImageSpan, ...]]:
    """Return the inverse of `keyed`: the placeholders, and the images, which are among `names`. Raise ValueError for any
    other."""
    if vision is None:
        return found, ()
    hidden = found < 0
    if not hidden.any():
        return found, ()
    edges = np.flatnonzero(np.diff(np.concatenate([[False], hidden, [False]])))
    images = []
    for start, stop in edges.reshape(-1, 2).tolist():
        name = next((n for n in names if (key(n, stop - start) == found[start:stop]).all()), None)
        if name is None:
            raise ValueError("an image in the prompt is none of the messages'")
        images.append(ImageSpan(name, start, stop - start))
    return np.where(hidden, np.int32(vision.pad), found).astype(np.int32), tuple(images)


def names_in(messages: Sequence[dict[str, Any]]) -> set[str]:
    """Return the hashes of the images in messages."""
    return {part["image"] for part in parts_in(messages) if part.get("type") == "image"}


def parts_in(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the parts of all messages whose content is a list of parts."""
    for message in messages:
        if isinstance(content := message.get("content"), list):
            yield from content


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found
