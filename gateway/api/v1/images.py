"""The images of requests: read once, named by their hashes from then on, and stored for the episode that has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Response

from gateway.api.access import Admin
from gateway.api.admin.admin_route import admin_router
from gateway.api.context import DataPlane
from gateway.control.models import ServedModel
from gateway.dialects.images import Image, ImageSupport
from gateway.dialects.request import GenerationRequest, Message
from gateway.render.images import names_in, parts_in
from gateway.render.offload import offload
from gateway.store import images as statements
from headgate.errors import BadRequest, EngineRefused, NotFound

_PER_REQUEST = 16
"""The most images of a conversation."""
_MAX_BYTES = 4 * 2**20
"""The most bytes of one image's file, which is stored as long as an episode has it."""
_EPISODE_BYTES = 256 * 2**20
"""The most bytes of all files that an episode has, each counted once."""

router = admin_router("admin")


@router.get("/images/{name}", response_class=Response, responses={200: {"content": {"image/*": {}}}})
async def image(name: str, access: Admin) -> Response:
    """Return an image's file, by its hash (SHA-256, hexadecimal)."""
    models = None if access.reach.everything else access.reach.models

    def read(connection: Any) -> tuple[str, bytes] | None:
        if not statements.used_in(connection, name, models):
            return None
        return statements.read(connection, name)

    found = await access.gateway.database.read(read)
    if found is None:
        raise NotFound(f"no image {name!r} is stored", code="no_image")
    return Response(found[1], media_type=found[0])


def image_support(model: ServedModel) -> ImageSupport:
    """Return a model's name, and whether `[models.NAME] images` lets it have images."""
    return ImageSupport(model.name, model.settings.images)


async def read_images(gateway: DataPlane, parsed: GenerationRequest) -> tuple[GenerationRequest, list[Image]]:
    """Read the images of a request; return it with their names in place of their files. Raise BadRequest."""
    if not _has_images(parsed.messages):
        return parsed, []
    found = dict[str, Image]()
    messages = await offload(parsed.messages, partial(_named, parsed.messages, found))
    return replace(parsed, messages=messages), list(found.values())


async def store_images(
    gateway: DataPlane, episode_id: str, messages: Sequence[Message], new: Sequence[Image]
) -> None:
    """Store the new images of a request, and record that its episode uses all of them.

    Raise BadRequest if an image of the conversation is not stored any more, or if the episode would have too many bytes.
    """
    names = names_in(messages)
    if not names:
        return
    rows = [{"hash": image.hash, "media_type": image.media_type, "data": image.data} for image in new]
    most = _EPISODE_BYTES

    def write(connection: Any) -> tuple[set[str], int]:
        return statements.keep(connection, episode_id, names, rows, most)

    missing, total = await gateway.database.submit(write)
    if missing:
        message = f"{len(missing)} images of this conversation are not stored any more: send it whole"
        raise BadRequest(message, code="image_gone", param="messages")
    if total > most:
        message = (
            f"the images of this episode would have {total} bytes, and may have {most}:"
            " send fewer or smaller ones"
        )
        raise BadRequest(message, code="too_large", param="messages")


async def load_image(gateway: DataPlane, name: str) -> tuple[str, bytes]:
    """Return the media type and the file of a stored image. Raise EngineRefused: without it no engine can continue."""
    found = await gateway.database.read(lambda c: statements.read(c, name))
    if found is None:
        raise EngineRefused(f"the image {name} is not stored any more", code="image_gone")
    return found


def _has_images(messages: Sequence[Message]) -> bool:
    return any(part.get("type") in ("image", "image_url") for part in parts_in(messages))


def _named(messages: Sequence[Message], found: dict[str, Image]) -> list[Message]:
    """Return the messages with images by name; `found` gets the images themselves."""
    count = 0

    def named(part: dict[str, Any]) -> dict[str, Any]:
        nonlocal count
        if part.get("type") not in ("image", "image_url"):
            return part
        count += 1
        if count > _PER_REQUEST:
            message = f"more images than the {_PER_REQUEST} that a request may have: send fewer"
            raise BadRequest(message, code="too_many", param=part.get("where", "messages"))
        if part["type"] == "image":
            return part
        read = Image.of(part["image_url"]["url"], part["where"], _MAX_BYTES)
        found[read.hash] = read
        return read.part

    return [
        {**message, "content": [named(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
