"""The state of one rank: model, optimizer, version and lineage, and how it is saved, restored, offloaded and published.

Owns the weights that are trained. Every method blocks and is called by one thread at a time; nothing here uses the gateway.
Invariants: `parent` is the version from whose weights this one was made; the version changes only by a step, `renumber` and
`restore`; a checkpoint in the background is a copy, so that the next steps do not change it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from torch import Tensor

from headgate.types import Probe
from trainer.algorithms import Algorithm, State
from trainer.config.settings import TrainingSettings
from trainer.errors import CheckpointDamaged, ConfigError
from trainer.model import build, optim, parallel, precision, pretrained, probe
from trainer.model.device import device_of, prepare_torch
from trainer.model.offload import Offload, Where
from trainer.model.parallel import Ranks
from trainer.model.policy import Policy
from trainer.model.shards import HostCopy
from trainer.model.vision import VisionInputs
from trainer.rank_rpc import on_all_ranks
from trainer.state import checkpoint
from trainer.state.images import IMAGE_CACHE_BYTES, ImageFiles
from trainer.state.origin import Origin


class BackgroundSave:
    """The checkpoint of this rank that a thread writes during training: at most one at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[checkpoint.CheckpointMeta] | None = None
        self.save_s: float | None = None
        """The seconds that the newest whole checkpoint took; None before it."""

    @property
    def busy(self) -> bool:
        """True while a checkpoint is being written."""
        return self._writing is not None and not self._writing.done()

    def begin(self, write: Callable[[], checkpoint.CheckpointMeta], began: float) -> None:
        """Begin to write; the previous one must be written. `began`: `time.monotonic()` at the start of its copy."""
        assert not self.busy

        def timed() -> checkpoint.CheckpointMeta:
            written = write()
            self.save_s = time.monotonic() - began
            return written

        self._writing = self._thread.submit(timed)

    def written(self) -> checkpoint.CheckpointMeta | None:
        """Wait for the checkpoint that was begun last, if there is one. Raise what its writing raised."""
        return None if self._writing is None else self._writing.result()


class RankState:
    """Model, optimizer and lineage; `open` starts from the initial weights or the newest checkpoint."""

    def __init__(self, settings: TrainingSettings, ranks: Ranks) -> None:
        self.settings = settings
        self.ranks = ranks
        self.in_rank_call = False
        self.rank_call_lock = threading.Lock()
        self.device = ranks.device
        self.version = 0
        self.parent: int | None = None
        self.steps = 0
        """Steps since the initial weights, skipped ones included."""
        self.probe: Probe | None = None
        """Distinguishes this version from its parent; None for version 0."""
        self.groups: tuple[str, ...] = ()
        """The sorted ids of the groups of the last step's batch."""
        self.algorithm_state: State = {}
        """What the algorithm remembers of the steps so far; the same on every rank."""
        self.saved: checkpoint.CheckpointMeta | None = None
        """The newest whole checkpoint; None before the first."""
        self.damaged: list[Path] = []
        """Newer checkpoints that are damaged, the newest first."""
        self.damage = ""
        """What is wrong with the newest of these, in a sentence."""
        self._background_save = BackgroundSave()
        self._host_copy = HostCopy()
        self._offload: Offload | None = None
        self.offloaded = False
        """True while weights, gradients and moments are not in the device's memory."""
        self.images = ImageFiles(settings.run.dir / "images", IMAGE_CACHE_BYTES)
        self.vision_inputs = VisionInputs.of(settings.model.path, self.images.read)
        """None if the model is given no images."""
        if self.vision_inputs is not None and settings.serves_adapters:
            raise ConfigError(
                "[publish] transport = 'lora': adapters of a vision model cannot be published without its weights; any other"
                " transport publishes their sum with the weights"
            )
        self._policy = build.trained(settings.model, ranks, settings.run.seed, self.vision_inputs)
        adapters = self._policy.adapters
        if adapters is not None and adapters.of_experts and settings.serves_adapters:
            raise ConfigError(
                "[publish] transport = 'lora': adapters of experts cannot be published without the weights; any other transport"
                " publishes their sum with them, or leave them out of [model.lora] targets"
            )
        self.algorithm: Algorithm = settings.algorithm.create()
        self.optimizer = optim.create(self._policy.model, settings.optimizer)
        self._reference: build.Reference | None = None
        if self.algorithm.needs_reference or self.algorithm.reward_kl:
            self._reference = build.reference(settings.model, ranks, self.policy)
        self._origin = Origin.of(settings.model.path) if ranks.is_rank_zero else None

    @property
    def policy(self) -> Policy:
        """The weights that are trained, which must not be offloaded."""
        if self.offloaded:
            raise RuntimeError("the weights are offloaded: nothing can be computed before `onload`")
        return self._policy

    @property
    def model(self) -> Any:
        """The Hugging Face model that is trained."""
        return self.policy.model

    @classmethod
    def open(cls, settings: TrainingSettings, *, older: bool = False) -> Self:
        """Return the state at the newest checkpoint under `[run] dir`, or at version 0. Collective.

        `older`: if the newest is damaged, use the newest that is whole; `damaged` then lists the others. Raise CheckpointError.
        """
        prepare_torch(settings)
        ranks = parallel.join(settings.parallel, device_of(settings))
        with ranks.within("start"):
            state = cls(settings, ranks)
            state._restore_newest(older)
        return state

    def _restore_newest(self, older: bool) -> None:
        """Restore the checkpoint that rank 0 chooses."""
        own = (checkpoint.newest_first(self.checkpoints), older) if self.ranks.is_rank_zero else None
        found, older = self.ranks.broadcast(own)
        for directory in found:
            try:
                return self._restore(directory)
            except CheckpointDamaged as error:
                self.damage = self.damage or str(error)
                self.damaged.append(directory)
                if not older:
                    break
        if not found:
            return
        remedy = "restore its files, or begin a new run in another [run] dir"
        if len(self.damaged) < len(found):
            remedy = "restore its files, or continue from the one before it with `trainer run --from-older`"
        elif len(found) > 1:
            remedy = f"none of the {len(found) - 1} older ones is whole either: {remedy}"
        raise CheckpointDamaged(f"{self.damage}; {remedy}")

    @property
    def checkpoints(self) -> Path:
        """The folder of this run's checkpoints."""
        return self.settings.run.dir / "checkpoints"

    @on_all_ranks
    def restore(self, directory: Path) -> None:
        """Restore model, optimizer, random numbers, version, lineage and probe from a checkpoint."""
        self._restore(directory)

    def _restore(self, directory: Path) -> None:
        meta = checkpoint.load(directory, self.model, self.optimizer, self.ranks, self._terms)
        self.version, self.parent, self.steps, self.probe = meta.version, meta.parent, meta.steps, meta.probe
        self.groups, self.algorithm_state, self.saved = meta.groups, meta.algorithm_state, meta

    @on_all_ranks
    def renumber(self, version: int) -> None:
        """Give the same weights a new number, as a child of the old one: the numbers between belong to a line that ends."""
        if self.probe is None:
            self.probe = probe.unchanged(self.policy, merged=not self.settings.serves_adapters)
        self.version, self.parent = version, self.version
        self.probe = replace(self.probe, parent_logprobs=self.probe.new_logprobs)

    @property
    def _terms(self) -> checkpoint.Terms:
        """What checkpoints have to agree with."""
        model_settings, depends = self.settings.model, ""
        if self._policy.adapters is not None:
            depends = "the result of [model.lora]"
        elif any(not weight.requires_grad for weight in self._policy.model.parameters()):
            depends = "the frozen part of the model"
        elif self._reference is not None:
            depends = "the reference of the KL term"
        return checkpoint.Terms(model_settings.dtype, model_settings.adapters, self._origin, depends)

    @on_all_ranks
    def save_checkpoint(self) -> Path:
        """Write the state as a checkpoint, atomically. Raise CheckpointError."""
        self.checkpoint_written()
        began, meta = time.monotonic(), self._meta()
        tensors = checkpoint.tensors_of(self.model, self.optimizer, self.ranks)
        path = checkpoint.save(self.checkpoints, meta, tensors, self.ranks)
        self._background_save.save_s = time.monotonic() - began
        self.saved = meta
        return path

    @on_all_ranks
    def begin_checkpoint(self) -> None:
        """Copy the state, and write the copy as a checkpoint in the background; wait for the previous one.

        Raise CheckpointError.
        """
        self.checkpoint_written()
        began, meta = time.monotonic(), self._meta()
        tensors = self._host_copy.copy(checkpoint.tensors_of(self.model, self.optimizer, self.ranks))

        def write() -> checkpoint.CheckpointMeta:
            checkpoint.save(self.checkpoints, meta, tensors, self.ranks.background)
            return meta

        self._background_save.begin(write, began)

    @property
    def saving(self) -> bool:
        """True while a checkpoint is written in the background."""
        return self._background_save.busy

    @property
    def save_s(self) -> float | None:
        """The seconds that the newest checkpoint of this process took, copy included; None before it is whole."""
        return self._background_save.save_s

    def checkpoint_written(self) -> None:
        """Wait until the checkpoint that was begun is whole on this rank. Raise CheckpointError or RankLost."""
        meta = self._background_save.written()
        if meta is not None and (self.saved is None or meta.version > self.saved.version):
            self.saved = meta

    def rename_damaged(self) -> None:
        """Rename the checkpoints that are newer than this one and damaged; only rank 0 does. Raise CheckpointError."""
        for directory in self.damaged:
            checkpoint.rename_damaged(directory)
        self.damaged, self.damage = [], ""

    def _meta(self) -> checkpoint.CheckpointMeta:
        """Return the metadata of a checkpoint of the current state."""
        return checkpoint.CheckpointMeta(
            version=self.version,
            parent=self.parent,
            steps=self.steps,
            probe=self.probe,
            groups=self.groups,
            algorithm_state=self.algorithm_state,
            dtype=self.settings.model.dtype,
            adapters=self.settings.model.adapters,
            origin=self._origin,
        )

    def prune_checkpoints(self) -> None:
        """Remove those beyond `[checkpoint] keep`. Call it only once the newest is of a version that is live."""
        checkpoint.prune(self.checkpoints, self.settings.checkpoint.keep)

    @on_all_ranks
    def offload(self, where: Where, directory: Path) -> None:
        """Move all weights, gradients and moments off the device, possibly in the middle of a batch. Raise OffloadFailed.

        `directory`: the folder of `disk`.
        """
        assert not self.offloaded
        if self._offload is None:
            self._offload = Offload(where, self.ranks, directory)
        parallel.reshard(self.policy)
        self._offload.out(self._tensors())
        self.offloaded = True

    @on_all_ranks
    def onload(self) -> None:
        """Move everything back that `offload` moved, bit by bit. Raise OffloadFailed."""
        assert self._offload is not None
        self._offload.back()
        self.offloaded = False

    def _tensors(self) -> Iterator[Tensor]:
        """Yield all that takes memory between two passes, except the tokens of a batch."""
        for module in (self._policy, self._reference):
            if isinstance(module, Policy):
                for weight in module.parameters():
                    yield weight
                    if weight.grad is not None:
                        yield weight.grad
                yield from module.buffers()
        for entry in self.optimizer.moments().values():
            yield from entry.values()

    @on_all_ranks
    def gather_weights(self, where: Literal["host", "device"] = "host") -> dict[str, Tensor]:
        """Return a copy of the whole weights as they are published, by name, in the host's memory or on this rank's
        device; empty on all ranks but 0.

        In `[model] dtype`, except for tensors that stay in float32 (`precision`).
        """
        state, model_settings = self.policy.published(), self.settings.model
        dtype = pretrained.DTYPES[model_settings.dtype]
        kept = precision.kept(self.model, model_settings.path, dtype, state)
        return parallel.gather(state, self.ranks, dtype, kept, self.device if where == "device" else "cpu")

    @on_all_ranks
    def gather_adapter(self) -> dict[str, Tensor]:
        """Return the adapters that `[model.lora]` trained, by their names in the model, on the CPU; empty on all ranks but 0."""
        assert self.policy.adapters is not None
        dtype = pretrained.DTYPES[self.settings.model.dtype]
        return parallel.gather(self.policy.adapters.factors(), self.ranks, dtype)
