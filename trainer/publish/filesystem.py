"""Published weights as directories; `docs/topics/weights.md` is the form.

Owns `DIR/v000007`, and beside it `v000007.rejected`, which says why the gateway does not take the version. Invariants: a
directory of that name is whole and never written again; a version is never written twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from gateway.types import Probe
from gateway.weights import delta, folders
from gateway.weights.manifest import FORMAT, MANIFEST, entry_of
from trainer.model import pretrained as models
from trainer.model.policy import Adapters
from trainer.state.directory import Aside, sweep

_WORTH_IT = 0.5
"""The share of the weights' bytes above which a delta is not kept."""


class WeightsDirectory:
    """The versions that one run published."""

    def __init__(self, directory: Path, companions: Path, *, deltas: bool = False) -> None:
        self.directory = directory
        self.deltas = deltas
        """True: each version has, beside its weights, what changed in them since its parent."""
        self.companions = companions
        """The initial checkpoint, whose tokenizer's files go with every version of whole weights."""

    def path(self, version: int) -> Path:
        """Where a version is, or would be."""
        return self.directory / folders.name_of(version)

    def write(
        self,
        version: int,
        parent: int | None,
        model: Any,
        probe: Probe | None,
        state: Mapping[str, Tensor] | None = None,
        adapters: Adapters | None = None,
    ) -> Path:
        """Writes a version, with `state` in place of the model's own. Raises VersionReused if it was written before.

        `adapters`: the version is these alone, and `state` has their factors.
        """
        with Aside(self.path(version)) as aside:
            if adapters is not None:
                adapters.save(aside, state or {})
            else:
                models.save(model, aside, self.companions, state)
            if self.deltas and parent is not None:
                self._write_delta(aside, parent)
            manifest = {
                "format": FORMAT,
                "version": version,
                "parent": parent,
                "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "files": {
                    str(file.relative_to(aside)): entry_of(file)
                    for file in sorted(aside.rglob("*"))
                    if file.is_file()
                },
                "probe": probe.to_json() if probe else None,
                "unchanged": [] if adapters else models.untrained(self.companions, aside),
            }  # fmt: skip
            (aside / MANIFEST).write_text(json.dumps(manifest, indent=1))
        return self.path(version)

    def _write_delta(self, aside: Path, parent: int) -> None:
        """Writes a version's delta, unless it would be of little use."""
        if self.path(parent).is_dir() and delta.write(aside / delta.NAME, self.path(parent), aside):
            whole = sum(file.stat().st_size for file in aside.glob("*.safetensors"))
            if (aside / delta.NAME).stat().st_size > _WORTH_IT * whole:
                (aside / delta.NAME).unlink()

    def parent(self, version: int) -> int | None:
        """The parent in the manifest of a written version. Raises OSError if there is none."""
        manifest: dict[str, Any] = json.loads((self.path(version) / MANIFEST).read_text())
        parent: int | None = manifest["parent"]
        return parent

    def reject(self, version: int, why: str) -> None:
        """Keeps why the gateway does not take a version."""
        self._rejection(version).write_text(why)

    def rejected(self, version: int) -> str | None:
        """Returns why the gateway does not take a version; None if it has not refused it."""
        try:
            return self._rejection(version).read_text()
        except FileNotFoundError:
            return None

    def _rejection(self, version: int) -> Path:
        path = self.path(version)
        return path.with_name(f"{path.name}.rejected")

    def newest(self) -> int:
        """The greatest number that was ever written here; 0 if none."""
        return max(folders.versions_in(self.directory), default=0)

    def prune(self, keep: int, *needed: int | None) -> None:
        """Removes the oldest directories beyond `keep`, but none of the versions `needed`."""
        sweep(self.directory)
        folders.prune(self.directory, keep, *needed)
