"""The number of tokens of an image: the model's own processor has the truth."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
from PIL import Image

from gateway.render.images import Vision, key, keyed, unkeyed
from headgate.types import ImageSpan
from tests.harness.vision_model import save_without_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vision")
    save_without_weights(directory)
    return directory


def test_an_image_has_as_many_tokens_as_the_processor_makes_of_it(folder: Path) -> None:
    from transformers import AutoImageProcessor

    processor, vision, random = AutoImageProcessor.from_pretrained(folder), Vision.read(folder), Random(1)
    sizes = [(random.randint(1, 400), random.randint(1, 400)) for _ in range(60)]
    sizes = [(w, h) for w, h in sizes if max(w, h) <= 200 * min(w, h)]
    for width, height in [(28, 28), (14, 14), (1, 150), *sizes]:
        grid = processor([Image.new("RGB", (width, height))], return_tensors="np")["image_grid_thw"][0]
        assert vision.tokens(width, height) == int(np.prod(grid)) // 4, (width, height)


def test_keys_of_images_can_be_read_back_and_differ(folder: Path) -> None:
    vision = Vision.read(folder)
    names = ["ab" * 32, "cd" * 32]
    ids = np.array([5, *[vision.pad] * 9, 6, *[vision.pad] * 9, 7], np.int32)
    images = (ImageSpan(names[0], 1, 9), ImageSpan(names[1], 11, 9))
    found = keyed(ids, images)
    assert (found < 0).sum() == 18
    assert found[1] != found[11]
    back, spans = unkeyed(found, names[::-1], vision)
    assert (back.tolist(), spans) == (ids.tolist(), images)
    with pytest.raises(ValueError, match="none of the messages"):
        unkeyed(key("ef" * 32, 3), names, vision)
