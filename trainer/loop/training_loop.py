"""One run of the loop against one gateway: release, lease, claim, stream, step, checkpoint, publish, ack.

A trainer at version v trains batch v and so makes version v + 1. `stream` is forward and backward over the groups as they become
ready, so a step begins before its batch is complete (StreamRL, arXiv 2504.15930). A version is published while the next batch is
trained (`publication`), and is live before the next step. Checkpoints (`checkpoints`) and the gateway's record of every batch
survive a crash: a new start trains the batches since the newest checkpoint again (`replay`). At version c it then publishes that
version, unless it is live. If it is given a batch below c, nothing is trained: if the batch's groups are those of the last step,
whose ids are in the checkpoint, the lease is acknowledged, else the batch is given back.

With `[gateway] nodes` (`nodes.py`), the nodes are released before the lease, and groups are only fetched until the nodes are
claimed: when the batch is complete, or when there are groups and the gateway has no other use for the nodes, because the batch
soon will be complete. The gateway predicts that from the computation time of earlier batches, which the release reports.

A number names one set of weights permanently. A trainer that cannot reproduce the newest number therefore begins a new line: the
checkpoint's weights are published under the next free number, with the checkpoint's own version as their parent, before anything
is trained. That orphans the versions between, and the gateway decides what happens to their samples.

Owns the lease while it is worked on (`feed`), and the trainer of rank 0. Everything that blocks runs in a thread, so that the
lease is renewed in the meantime; the gradient of a batch that cannot be finished is discarded.
"""

from __future__ import annotations

import time

from headgate.client import GatewayClient
from headgate.processes.slow import SILENT_S, reported
from headgate.types import Group, Lease, LeasedGroups
from headgate.weights import folders
from trainer.config.settings import Settings
from trainer.data.batch import Batch
from trainer.data.details import DetailChoice
from trainer.errors import (
    FeedBroken,
    GatewayAhead,
    NotFinite,
    StepTimeout,
    TooManyFailed,
    TrainerError,
)
from trainer.loop import feed, replay
from trainer.loop.agreement import (
    check_dropped,
    check_length,
    check_routers,
    check_teacher,
    warn_uncorrected,
)
from trainer.loop.checkpoints import Checkpoints
from trainer.loop.episode_counts import FailedEpisodes, GroupTotals, RolloutTotals
from trainer.loop.evaluations import Evaluations
from trainer.loop.feed import Feed, naming_step
from trainer.loop.images import EpisodeImages
from trainer.loop.nodes import Nodes, device_memory
from trainer.loop.publication import Publication, shown_version
from trainer.loop.step_events import RunName, StepEvents
from trainer.loop.tasks import Companion, in_thread, run_with_companions
from trainer.loop.teacher import Teacher, scored
from trainer.publish.filesystem import WeightsDirectory
from trainer.rank_trainer import MAX_SKIPPED_STEPS, RankTrainer
from trainer.report.details import Details
from trainer.report.metrics import Clock, Metrics, masked_warning
from trainer.state.directory import sweep

_LATER_S = 60.0
"""Seconds after which waiting for a batch is reported, once a step has shown that agents earn groups."""


class TrainingLoop:
    """The loop of rank 0."""

    def __init__(
        self,
        settings: Settings,
        trainer: RankTrainer,
        client: GatewayClient,
        metrics: Metrics,
        url: str = "",
        *,
        from_older: bool = False,
    ) -> None:
        """`url`: the gateway's, for evaluations. `from_older`: continue without a damaged newest checkpoint."""
        self.settings = settings
        self.trainer = trainer
        self.metrics = metrics
        self.weights = WeightsDirectory(
            settings.run.dir.resolve() / "weights", settings.model.path, deltas=settings.publish.delta
        )
        gateway, notify = settings.gateway, metrics.notify
        self.feed = Feed(client, gateway.model, gateway.timeout_s, notify)
        self.images = EpisodeImages(self.feed, trainer.images, trainer.vision_inputs, notify)
        self.teacher = None if settings.distill is None else Teacher(settings.distill, notify)
        self.nodes = Nodes(self.feed, gateway.nodes, device_memory(settings, trainer))
        self.checkpoints = Checkpoints(trainer, settings.checkpoint.every, settings.run.steps)
        shown = shown_version(settings, self.weights.directory)
        self.publication = Publication(
            settings.publish, trainer, self.feed, self.weights, self.checkpoints, shown
        )
        self.step_events = StepEvents(client, gateway.model, notify, RunName.of(settings))
        self.evaluations = Evaluations(
            settings, url or gateway.url or "", self.feed, metrics, self.step_events.send
        )
        self.details = Details(settings)
        self.failed_episodes = FailedEpisodes(settings.run.max_failed_share)
        self.group_totals = GroupTotals()
        self.rollout_totals = RolloutTotals()
        self._from_older = from_older
        self._compute_s = 0.0
        """Seconds of computation on the groups of the last batch."""
        self._overhead_s = 0.0
        """Seconds of other work on that batch: neither waiting nor computing on groups."""
        self._warned: set[str] = set()
        """Reasons of masked tokens that were warned of."""

    def node_claim_task(self) -> Companion:
        """Return the task that renews the claims of nodes."""
        return Companion("renewal of the claim", self.nodes.renew())

    def background_tasks(self) -> tuple[Companion, Companion]:
        """Return the tasks that fail as soon as work that runs during training fails."""
        return self.checkpoints.watch(), self.publication.watch()

    async def check_versions(self) -> None:
        """Advance the trainer to the newest version number that was used, by replay or by a new line.

        First remove what killed processes left half-written. Raise GatewayAhead without a checkpoint, VersionRejected if the
        gateway refused the newest weights, and ConfigError for what trainer and gateway do not agree on (`agreement`).
        """
        for directory in (self.weights.directory, self.trainer.checkpoints):
            await in_thread(sweep, directory)
        if self.nodes.memory is not None:
            # The weights are on the nodes, which must not be lent until the weights have left them.
            await self.nodes.claim()
        if (why := self.weights.rejected(self.trainer.version)) is not None:
            raise self.publication.rejected(why)
        if self.teacher is not None:
            await self.teacher.check(self.settings.model.path)
        status = await self.feed.status()
        self.group_totals.update(status.get("settled", {}))
        check_teacher(self.settings, self.trainer.vision_inputs is not None)
        check_dropped(self.settings, self.trainer.algorithm, status["drop_equal"])
        check_length(self.settings, status["max_model_len"])
        router_replay = self.trainer.policy.replay
        check_routers(None if router_replay is None else router_replay.shape, status.get("routers"))
        if warning := warn_uncorrected(self.settings, status.get("quantization")):
            self.metrics.notify(warning)
        self.publication.begun = status["version"]
        published, consumed = status["newest_version"], status["consumed"]
        if renamed := await self.checkpoints.leave_damaged(consumed, from_older=self._from_older):
            self.metrics.notify(renamed)
        used = max(published, self.weights.newest())
        if max(used, consumed) > self.trainer.version:
            await self._catch_up(published, used, consumed)
        elif self.trainer.saved is None:
            # Batches that are acknowledged before the first checkpoint name this one.
            await self.checkpoints.write()

    async def _catch_up(self, published: int, used: int, consumed: int) -> None:
        """Replay to version `used`, the newest written, and on to `consumed`, the acknowledged one; else begin a new line."""
        old = self.trainer.version
        known = f"version {used} was published" if used > old else f"batch {consumed - 1} was trained"
        if self.trainer.saved is None:
            raise GatewayAhead(
                f"{known} already, but {self.trainer.checkpoints} has no checkpoint: restore one, or give the"
                " gateway and the trainer a new run"
            )
        await self.nodes.claim()
        try:
            await replay.replay(
                self.trainer, self.feed, self.images, self.teacher, self.weights, published, used, consumed
            )
        except replay.ReplayFailed as reason:
            self.trainer.renumber(max(used + 1, consumed))
            self.metrics.notify(
                f"{known}, but the newest checkpoint is of version {old}: {reason}; continuing from its weights as version"
                f" {self.trainer.version}{replay.left_out(old, consumed)}"
            )
            await self.checkpoints.write()
            await self.publication.publish()
        else:
            self.metrics.notify(
                f"the batches since the checkpoint of version {old}, trained again, {replay.outcome(old, used, consumed)}:"
                " nothing lost, nothing trained twice"
            )
            await self.checkpoints.after_replay()

    async def train(self) -> None:
        """Lease and train batches until the run ends."""
        await self.evaluations.resume()
        await self._check_failures()
        while True:
            self.metrics.waiting(self.trainer.version, self.trainer.steps)
            await self.nodes.release(self._compute_s, self._overhead_s)
            self._compute_s = self._overhead_s = 0.0
            if self.publication.begun < self.trainer.version:
                await self._publish_first()
                continue
            last = self._is_last
            await self.evaluations.begin(self.trainer.version, self.trainer.steps, last)
            if last and await self.feed.acknowledged(self.trainer.version - 1):
                await self.evaluations.finish()
                await self.step_events.finish()
                return
            clock = Clock()
            with clock.on("lease", "idle"):
                lease = await self.feed.lease()
            renewal = Companion("renewal of the lease", self.feed.renew())
            await run_with_companions(self.work(lease, clock), renewal)

    @property
    def _is_last(self) -> bool:
        """True once the current version is the run's last one."""
        return self.trainer.steps >= self.settings.run.steps

    async def _publish_first(self) -> None:
        """Publish the version of a new start that a killed trainer did not publish."""
        await self.evaluations.release_engines()
        await self.nodes.claim()
        await self._begin_publication()

    async def _begin_publication(self) -> None:
        """Begin to publish the current version; wait for engines only if they, or their nodes, are needed immediately."""
        await self.publication.begin()
        last = self._is_last
        if last or self.settings.gateway.nodes or self.evaluations.is_due(self.trainer.steps, last):
            await self.publication.finish()

    async def work(self, lease: Lease, clock: Clock) -> None:
        """Train the leased batch, and acknowledge it. Raise GatewayAhead for a batch above the trainer's version."""
        version = self.trainer.version
        if lease.batch > version:
            raise GatewayAhead(
                f"the gateway leases batch {lease.batch}, but the trainer is at version {version}"
            )
        if lease.batch < version:
            await self.publication.finish()
            await self._end_lease(lease.batch)
            return
        batch, measured = await self._trained(lease, clock)
        with clock.on("checkpoint"):
            await self.checkpoints.after_step()
        await self._release_engines(clock)
        with clock.on("publish"):
            await self._begin_publication()
        with clock.on("ack"), naming_step("ack"):
            await self.ack()
        if batch.details.choice != DetailChoice():
            with clock.on("details"):
                await in_thread(self.details.write, self.trainer.steps, batch)
        self._report(version, measured, clock)
        await self._check_skipped()

    async def _trained(self, lease: Lease, clock: Clock) -> tuple[Batch, dict[str, float]]:
        """Make the step of the leased batch, and return the batch and its figures."""
        try:
            what = f"agents to earn the {lease.size} groups of batch {lease.batch}"
            after_s = _LATER_S if self.metrics.has_steps else SILENT_S
            with naming_step("stream"), reported(self.metrics.notify, what, after_s):
                batch = await self.stream(clock)
            await self._check_failures()
            with clock.on("publish"):
                await self.publication.finish()
            with clock.on("step", "compute"):
                measured = await in_thread(self.trainer.step, batch)
        finally:
            self.trainer.discard()
        measured |= self.failed_episodes.figures() | self.group_totals.figures(measured)
        measured |= self.rollout_totals.figures() | {"ranks": float(self.trainer.ranks.size)}
        self._compute_s = clock.seconds["compute"] - clock.seconds["step"]
        return batch, measured

    def _report(self, version: int, measured: dict[str, float], clock: Clock) -> None:
        """Report a trained batch to metrics and gateway, and warn of masked tokens once for every reason."""
        warning = masked_warning(measured)
        if warning is not None and warning[0] not in self._warned:
            self._warned.add(warning[0])
            self.metrics.notify(warning[1])
        self._overhead_s = clock.total - clock.seconds["idle"] - self._compute_s
        if self.nodes.memory is not None:
            clock.seconds |= {"offload": self.nodes.memory.free_s, "onload": self.nodes.memory.fill_s}
        figures = self.metrics.trained(version, measured, clock.seconds, clock.total, clock.spans)
        self.step_events.send(self.trainer.steps, version + 1, figures)

    async def _check_failures(self) -> None:
        """Count the episodes and groups that ended. Raise TooManyFailed, with the last error of an agent."""
        status = await self.feed.status()
        self.group_totals.update(status.get("settled", {}))
        self.rollout_totals.update(status)
        try:
            self.failed_episodes.update(status.get("ended", {}))
        except TooManyFailed as error:
            last = await self.feed.last_failure(status["model"], error.reason)
            raise TooManyFailed(f"{error}; {last}", error.reason) from error

    async def _check_skipped(self) -> None:
        """Report a skipped step. Raise NotFinite once too many in a row were skipped, and the last version is live."""
        skipped = self.trainer.skipped
        if not skipped:
            return
        version = self.trainer.version
        self.metrics.notify(
            f"loss or gradient is not finite: the step is skipped, and version {version} has the weights of version"
            f" {version - 1} ({skipped} in a row, the run stops at {MAX_SKIPPED_STEPS})"
        )
        if skipped >= MAX_SKIPPED_STEPS:
            await self.publication.finish()
            raise NotFinite(
                f"{skipped} steps in a row had a loss or gradient that is not finite; none of them changed a weight, so the next"
                " start continues from before them; lower [optimizer] lr, or check the rewards first"
            )

    async def _end_lease(self, batch: int) -> None:
        """End the lease of a batch below the version: acknowledge it if its effect is in the weights, else give it back.

        Raise FeedBroken if the gateway continues to lease that batch.
        """
        if await self._has_trained(batch):
            await self.ack()
            return
        why = f"the weights of version {self.trainer.version} were not trained on the groups of batch {batch}"
        await self.feed.nack(why)
        if not await self.feed.acknowledged(batch):
            raise FeedBroken(f"{why}, and the gateway does not skip the batch")
        self.metrics.notify(f"{why}: given back, and never trained")

    async def _has_trained(self, batch: int) -> bool:
        """Return true if the last step was trained on the groups of the leased batch."""
        fetched = await self.feed.groups(0, 0.0)
        own = [*self.trainer.groups]
        return fetched.complete and sorted(group.group_id for group in fetched.groups) == own

    async def stream(self, clock: Clock) -> Batch:
        """Train on the batch's groups as they become ready, while the nodes are claimed; return the batch.

        The gradient of its sum is in the model then. Raise StepTimeout if no group arrives for `[run] batch_timeout_s`.
        """
        await self.images.trim()
        batch = self.trainer.begin_batch(self.details.choice_of(self.trainer.steps + 1))
        cursor, limit = 0, self.settings.run.batch_timeout_s
        gathered: tuple[Group, ...] = ()
        missing: frozenset[str] = frozenset()
        deadline = time.monotonic() + limit
        waits = ["first_group", "idle"]
        while True:
            with clock.on(*waits):
                fetched, claims = await self._fetch(cursor, bool(gathered))
            missing |= await self.images.fetch(fetched.groups)
            with clock.on("teacher", "idle"):
                groups = await scored(self.teacher, fetched.groups)
            cursor, gathered = fetched.cursor, gathered + groups
            arrived, size = len(batch.group_ids) + len(gathered), self.feed.current_lease.size
            self.metrics.collected(arrived, size)
            if claims:
                await self._release_engines(
                    clock
                )  # the evaluation needs engines, which may be put to sleep now
                with clock.on("claim", "idle"):
                    await self.nodes.claim()
            if self.nodes.can_compute:
                with clock.on("stream", "compute"):
                    if missing:
                        await in_thread(self.trainer.exclude_images, batch, missing)
                    await in_thread(self.trainer.add_groups, batch, gathered)
                gathered, missing = (), frozenset()
            if fetched.complete:
                return batch
            if arrived:
                waits = ["stream", "idle"]
            if not fetched.groups:
                await self._check_failures()
            if not fetched.groups and time.monotonic() > deadline:
                raise StepTimeout("stream", limit, f"{arrived} of {size} groups arrived")

    async def _fetch(self, cursor: int, gathered: bool) -> tuple[LeasedGroups, bool]:
        """Return the groups after `cursor`, possibly none, and whether to claim the nodes now."""
        until = time.monotonic() + feed.POLL_S
        while True:
            polls_nodes = gathered and not self.nodes.can_compute
            fetched = await self.feed.groups(cursor, feed.RECALL_POLL_S if polls_nodes else feed.POLL_S)
            any_groups = gathered or bool(fetched.groups)
            if not self.nodes.can_compute and (
                fetched.complete or (any_groups and await self.nodes.recalled())
            ):
                return fetched, True
            if fetched.groups or fetched.complete or time.monotonic() > until:
                return fetched, False

    async def _release_engines(self, clock: Clock) -> None:
        """Wait until the evaluation of this version lets the engines change."""
        if self.evaluations.running:
            with clock.on("evaluation", "idle"):
                await self.evaluations.release_engines()

    async def before_stop(self) -> None:
        """Write what a start would have to train again, and report an error of that."""
        try:
            await self.checkpoints.before_stop()
        except TrainerError as error:
            self.metrics.notify(f"stopped without a last checkpoint: {error}")

    async def ack(self) -> None:
        """Acknowledge the batch: the newest checkpoint, with the recorded batches since, reproduces its effect."""
        assert self.trainer.saved is not None
        path = self.trainer.checkpoints / folders.name_of(self.trainer.saved.version)
        await self.feed.ack(str(path))
