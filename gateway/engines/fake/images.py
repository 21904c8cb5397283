"""The answer of vLLM's render endpoint to one PNG image, for a model whose patches of 14 pixels are merged two by two."""

from __future__ import annotations

import base64
from typing import Any

_UNIT = 28


def rendered(values: dict[str, Any]) -> dict[str, Any]:
    """The features of the one image in a request. Its sides are to be multiples of 28, because nothing is resized here."""
    (part,) = values["messages"][0]["content"]
    data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    if width % _UNIT or height % _UNIT:
        raise RuntimeError(f"the fake engine resizes no image, and this one has {width} x {height} pixels")
    length = width // _UNIT * (height // _UNIT)
    return {
        "mm_hashes": {"image": ["by its pixels"]},
        "mm_placeholders": {"image": [{"offset": 0, "length": length}]},
        "kwargs_data": {"image": ["pixels"]},
    }
