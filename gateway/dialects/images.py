"""Images that clients send: data URLs, whose files are PNG, JPEG, GIF or WebP. Pure.

A dialect leaves an image as a part of chat completions (`image_url` with a data URL); `Image.of` reads it. Nothing is decoded
here; only the size is read from the file's header.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass
from typing import Any

from headgate.errors import BadRequest, invalid

TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
MOST_ASPECT = 200
"""The processors of the Qwen-VL family take no image that is longer than this times its width."""
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
"""The segments of a JPEG that hold its size."""


@dataclass(frozen=True, slots=True)
class ImageSupport:
    """The name of a request's model, for errors, and whether it takes images."""

    model: str = ""
    enabled: bool = False


TEXT_ONLY = ImageSupport()


@dataclass(frozen=True, slots=True)
class Image:
    """An image's file."""

    hash: str
    """SHA-256 of the file, in hexadecimal digits."""
    media_type: str
    width: int
    height: int
    data: bytes

    @classmethod
    def of(cls, url: str, where: str, most: int) -> Image:
        """Read a data URL. Raise BadRequest if it is not valid. `most`: bytes that a file may have."""
        head, _, text = url.partition(",")
        media_type, _, form = head.removeprefix("data:").partition(";")
        if form != "base64" or media_type not in TYPES:
            raise invalid(
                where, f"a data URL of an image must begin with data:TYPE;base64, for {', '.join(TYPES)}"
            )
        if len(text) * 3 // 4 > most + 3:
            raise _too_large(where, most)
        try:
            data = base64.b64decode(text, validate=True)
            width, height = _size(data)
        except (binascii.Error, ValueError, IndexError) as error:
            raise invalid(where, f"the image cannot be read: {error}") from error
        if len(data) > most:
            raise _too_large(where, most)
        return cls(hashlib.sha256(data).hexdigest(), media_type, width, height, data)

    @property
    def part(self) -> dict[str, Any]:
        """The image as a part of a message, from here on."""
        return {"type": "image", "image": self.hash, "width": self.width, "height": self.height}


def check_url(value: Any, where: str, detail: Any = None) -> str:
    """Return an image's URL. Raise BadRequest unless it has the image's bytes."""
    if not isinstance(value, str):
        raise invalid(where, "an image needs a URL, as a string")
    if not value.startswith("data:"):
        raise BadRequest(
            f"{where}: an image at a URL is not supported here: the gateway fetches none; send its bytes as a data URL"
            " (data:image/png;base64,...)",
            code="unsupported_content",
            param=where,
        )
    if detail not in (None, "auto", "high", "original"):
        raise BadRequest(
            f"{where}: the detail {detail!r} is not supported here: the model's processor sets the size of an image; leave it"
            " out",
            code="unsupported_content",
            param=where,
        )
    return value


def url_part(url: str, where: str) -> dict[str, Any]:
    """Return the part of a message that has an image's data URL; `where`: its place in the request, for errors."""
    return {"type": "image_url", "image_url": {"url": url}, "where": where}


def _size(data: bytes) -> tuple[int, int]:
    """Width and height, from the file's head. Raise ValueError."""
    if data[:8] == b"\x89PNG\r\n\x1a\n" and data[12:16] == b"IHDR":
        size = _big(data[16:20]), _big(data[20:24])
    elif data[:6] in (b"GIF87a", b"GIF89a"):
        size = _little(data[6:8]), _little(data[8:10])
    elif data[:2] == b"\xff\xd8":
        size = _jpeg(data)
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        size = _webp(data)
    else:
        raise ValueError("it is not a PNG, JPEG, GIF or WebP file")
    if min(size) < 1 or max(size) > MOST_ASPECT * min(size):
        raise ValueError(f"one side of {size[0]} x {size[1]} is longer than {MOST_ASPECT} times the other")
    return size


def _jpeg(data: bytes) -> tuple[int, int]:
    at = 2
    while at + 9 <= len(data):
        if data[at] != 0xFF:
            break
        kind = data[at + 1]
        if kind in _FRAMES:
            return _big(data[at + 7 : at + 9]), _big(data[at + 5 : at + 7])
        if kind == 0xFF:
            at += 1
        elif kind == 0x01 or 0xD0 <= kind <= 0xD7:
            at += 2
        else:
            at += 2 + _big(data[at + 2 : at + 4])
    raise ValueError("the JPEG file has no size")


def _webp(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        return _little(data[24:27]) + 1, _little(data[27:30]) + 1
    if kind == b"VP8L":
        bits = _little(data[21:25])
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        return _little(data[26:28]) & 0x3FFF, _little(data[28:30]) & 0x3FFF
    raise ValueError("the WebP file has no size")


def _big(data: bytes) -> int:
    return int.from_bytes(data, "big")


def _little(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _too_large(where: str, most: int) -> BadRequest:
    message = f"an image may have {most} bytes: send a smaller one"
    return invalid(where, message, "too_large")
