"""Which model a run began with: its config and a fingerprint of its weights, on which a checkpoint of adapters depends.

The fingerprint is a BLAKE3 over name, precision, shape and the middle 64 KiB of every tensor: it detects other
weights of the same shapes, but not a change outside of a tensor's middle, such as a flipped bit. Owns no state.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from blake3 import blake3

_PIECE = 2**16
_NO_MATTER = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
"""Keys of a config that do not change what is computed; `[model] dtype` sets the precision."""
_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"
_MANY = 3
"""Changes that an error names."""
_ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Origin:
    """The model that a run began with."""

    config: Mapping[str, Any]
    """Its config.json, without what does not matter."""
    weights: str
    """The fingerprint of its weights, hexadecimal."""

    @classmethod
    def of(cls, path: Path) -> Origin:
        """Return the origin of a run whose `[model] path` it is. Raise OSError or ValueError if it cannot be read."""
        config = _mattering(json.loads((path / "config.json").read_text()))
        return cls(config, _fingerprint(path))

    def changes(self, now: Origin) -> str:
        """Return what a config has that this one has not, key by key; empty if nothing."""
        found = list(islice(_changes(self.config, now.config, ""), _MANY + 1))
        return ", ".join(found[:_MANY]) + (" and more" if len(found) > _MANY else "")


def _mattering(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _mattering(each) for key, each in value.items() if key not in _NO_MATTER}
    return [_mattering(each) for each in value] if isinstance(value, list) else value


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key in sorted(before.keys() | now.keys()):
        one, other = before.get(key, _ABSENT), now.get(key, _ABSENT)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _changes(one, other, f"{prefix}{key}.")
        elif one != other:
            yield f"{prefix}{key} is {other} and was {one}"


def _fingerprint(path: Path) -> str:
    names = [_WHOLE]
    if (index := path / _INDEX).is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    pieces = sorted(piece for name in names for piece in _pieces(path / name))
    return blake3("\n".join(pieces).encode()).hexdigest()


def _pieces(file: Path) -> Iterator[str]:
    """Yield a line for each tensor of a safetensors file."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        (length,) = struct.unpack("<Q", os.pread(descriptor, 8, 0))
        entries = json.loads(os.pread(descriptor, length, 8))
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            size = min(_PIECE, end - begin)
            data = os.pread(descriptor, size, 8 + length + begin + (end - begin - size) // 2)
            yield f"{name} {entry['dtype']} {entry['shape']} {blake3(data).hexdigest()}"
    finally:
        os.close(descriptor)
