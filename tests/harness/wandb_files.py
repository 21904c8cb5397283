"""Reads the files that W&B writes offline, by their own format (LevelDB's log) and the types of W&B's protocol."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _FILE_HEADER, _HEADER = 32_768, 7, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(file: Path) -> Iterator[Any]:
    """Yield the records of a `run-*.wandb` file, as protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = file.read_bytes()
    assert data[:4] == b":W&B"
    at, joined = _FILE_HEADER, b""
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        assert kind in (_FULL, _FIRST, _MIDDLE, _LAST)
        piece = data[at + _HEADER : at + _HEADER + length]
        joined = piece if kind in (_FULL, _FIRST) else joined + piece
        at += _HEADER + length
        if kind in (_FULL, _LAST):
            yield Record.FromString(joined)


def history(file: Path) -> list[dict[str, Any]]:
    """Return the logged rows of a file, each with its `_step`."""
    return [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records(file)
        if record.WhichOneof("record_type") == "history"
    ]


def runs(folder: Path) -> list[tuple[str, Path]]:
    """Return the id and the file of each offline run under a folder `wandb`, oldest first."""
    found = []
    for file in sorted(folder.glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime):
        (run,) = {record.run.run_id for record in records(file) if record.WhichOneof("record_type") == "run"}
        found.append((run, file))
    return found
