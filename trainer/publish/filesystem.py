"""Published weights as directories; `docs/topics/weights.md` is the form.

Owns `DIR/v000007`, and `v000007.rejected`, which has the gateway's reason for refusing the version. Invariants: a
directory of that name is whole and never written again; a version is never written twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from headgate.types import Probe
from headgate.weights import delta, folders
from headgate.weights.manifest import MANIFEST, write_manifest
from trainer.model import pretrained as models
from trainer.model.policy import Adapters
from trainer.state.directory import sweep

_WORTH_IT = 0.5
"""The share of the weights' bytes above which a delta is not kept."""


class WeightsDirectory:
    """The versions that one run published."""

    def __init__(self, directory: Path, companions: Path, *, deltas: bool = False) -> None:
        self.directory = directory
        self.deltas = deltas
        """True: each version also has the difference of its weights to its parent's."""
        self.companions = companions
        """The initial checkpoint, whose tokenizer's files go with every version of whole weights."""

    def path(self, version: int) -> Path:
        """Return where a version is, or would be."""
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
        """Write a version, with `state` instead of the model's own. Raise FileExistsError if it was written before.

        `adapters`: the version has only these, and `state` has their factors.
        """
        with folders.AtomicDirectory(self.path(version)) as temporary:
            if adapters is not None:
                adapters.save(temporary, state or {})
            else:
                models.save(model, temporary, self.companions, state)
            if self.deltas and parent is not None:
                self._write_delta(temporary, parent)
            unchanged = [] if adapters else models.untrained(self.companions, temporary)
            write_manifest(temporary, version, parent, probe, unchanged)
        return self.path(version)

    def _write_delta(self, temporary: Path, parent: int) -> None:
        """Write a version's delta, unless it would be of little use."""
        if self.path(parent).is_dir() and delta.write(temporary / delta.NAME, self.path(parent), temporary):
            whole = folders.weight_bytes(temporary)
            if (temporary / delta.NAME).stat().st_size > _WORTH_IT * whole:
                (temporary / delta.NAME).unlink()

    def parent(self, version: int) -> int | None:
        """Return the parent in the manifest of a written version. Raise OSError if there is none."""
        manifest: dict[str, Any] = json.loads((self.path(version) / MANIFEST).read_text())
        parent: int | None = manifest["parent"]
        return parent

    def reject(self, version: int, why: str) -> None:
        """Store why the gateway refused a version."""
        self._rejection(version).write_text(why)

    def rejected(self, version: int) -> str | None:
        """Return why the gateway refused a version; None if it did not."""
        try:
            return self._rejection(version).read_text()
        except FileNotFoundError:
            return None

    def _rejection(self, version: int) -> Path:
        path = self.path(version)
        return path.with_name(f"{path.name}.rejected")

    def newest(self) -> int:
        """Return the greatest number that was ever written here; 0 if none."""
        return max(folders.versions_in(self.directory), default=0)

    def prune(self, keep: int, *needed: int | None) -> None:
        """Remove the oldest directories beyond `keep`, but none of the versions `needed`."""
        sweep(self.directory)
        folders.prune(self.directory, keep, *needed)
