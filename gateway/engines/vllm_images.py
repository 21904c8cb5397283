"""Images in requests to vLLM: sent once as its own processor makes them of the file, and by their hash from then on.

Invariant: a request goes to the engine only if its processor counts as many tokens for an image as the prompt has for it.
"""

from __future__ import annotations

import base64
from typing import Any

import orjson

from gateway.engines.base import GenerateRequest
from gateway.engines.http import EngineHTTP
from headgate.errors import EngineError, EngineRefused
from headgate.types import ImageSpan

_RENDER = "/v1/chat/completions/render"


class EngineImages:
    """The images that one engine has been sent since its caches were emptied."""

    def __init__(self, name: str, http: EngineHTTP) -> None:
        self._name = name
        self._http = http
        self._sent: dict[str, int] = {}
        """The hashes of the images that the engine has, with the number of tokens of each."""

    def forget(self) -> None:
        """Forget all images: the engine may have lost them."""
        self._sent.clear()

    async def features(self, request: GenerateRequest) -> dict[str, Any]:
        """Return the `features` of a request. Raise EngineRefused where the engine counts an image's tokens differently."""
        items: list[str | None] = []
        for image in request.images:
            known = self._sent.get(image.hash) == image.length
            items.append(None if known else await self._processed(request, image))
            self._sent[image.hash] = image.length
        return {
            "mm_hashes": {"image": [image.hash for image in request.images]},
            "mm_placeholders": {
                "image": [{"offset": image.offset, "length": image.length} for image in request.images]
            },
            "kwargs_data": {"image": items},
        }

    async def _processed(self, request: GenerateRequest, image: ImageSpan) -> str:
        """Return an image as the engine's processor makes it, in vLLM's encoding."""
        media_type, data = await request.load_image(image.hash)
        url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
        part = {"type": "image_url", "image_url": {"url": url}}
        body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
        features = (orjson.loads(await self._http.post(_RENDER, body)) or {}).get("features") or {}
        places = (features.get("mm_placeholders") or {}).get("image") or []
        items = (features.get("kwargs_data") or {}).get("image") or [None]
        if len(places) != 1 or items[0] is None:
            raise EngineError(f"engine {self._name} makes nothing of the image {image.hash}")
        if places[0]["length"] != image.length:
            raise EngineRefused(
                f"engine {self._name} has {places[0]['length']} tokens for the image {image.hash}, and the prompt {image.length}:"
                " is the model's folder the one that the engine was started with, and its processor left as it is?"
            )
        item: str = items[0]
        return item
