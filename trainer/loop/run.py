"""The loop: release, lease, claim, stream, step, checkpoint, publish, ack.

A trainer at version v trains buffer v and so makes version v + 1. `stream` is forward and backward over the groups as they
become ready, so a step begins before its batch is whole (StreamRL, arXiv 2504.15930). A version is published beside that
(`publication`), and is live before the next step. What survives a crash are checkpoints, which are written while
training goes on (`checkpoints`), and the gateway's record of every batch: a new start trains the batches since the newest
checkpoint again (`replay`). At version c it then publishes that, unless it is live. If it is given a buffer below c, nothing is
trained: if the buffer's groups are those of the last step, whose ids are in the checkpoint, the lease is acknowledged, else the
buffer is given back.

With `[gateway] nodes` (`nodes.py`), the nodes are released before the lease, and groups are only fetched until they are claimed:
when the batch is whole, or there are groups and the gateway has no other use for the nodes, because the batch soon will be. How
soon that is it knows from how long the trainer computed on the groups of earlier batches, which is told with the release.

A number names one set of weights for ever. A trainer that cannot come back to the newest number therefore begins a new line: the
checkpoint's weights are published anew under the next free number, with the checkpoint's own version as their parent, before
anything is trained. That orphans the versions between, and the gateway says what becomes of their samples.

Owns the child processes (`cluster`), the lease while it is worked on (`feed`), and the learner. Everything that blocks runs in a
thread, so that the lease is renewed meanwhile; a gradient whose batch cannot be finished is forgotten.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import TypeVar

from gateway.client import GatewayClient
from gateway.types import Group, Lease, LeasedGroups
from gateway.weights import folders
from processes.slow import SILENT_S, reported
from trainer.algorithms import create, learns_from_equal
from trainer.data.batch import Batch
from trainer.data.details import DetailChoice
from trainer.errors import (
    ConfigError,
    FeedBroken,
    GatewayAhead,
    NotFinite,
    RankLost,
    StepTimeout,
    TooManyExcluded,
    TrainerError,
)
from trainer.learner import Learner, cpu_warning, device_of
from trainer.loop import feed, replay
from trainer.loop.checkpoints import Checkpoints
from trainer.loop.children import (
    Watched,
    gateway_process,
    rollout_log,
    rollout_process,
    watch,
    weights_process,
)
from trainer.loop.clock import Clock
from trainer.loop.evaluations import Evaluations
from trainer.loop.excluded import Excluded
from trainer.loop.feed import Feed, naming
from trainer.loop.heartbeat import heartbeat
from trainer.loop.images import EpisodeImages
from trainer.loop.nodes import Memory, Nodes
from trainer.loop.publication import Publication
from trainer.loop.settled import Settled
from trainer.loop.step_events import RunName, StepEvents
from trainer.loop.threads import in_thread
from trainer.model.offload import Where
from trainer.orders import dismiss, follow
from trainer.publish.filesystem import WeightsDirectory
from trainer.report import trackers
from trainer.report.details import Details
from trainer.report.masking import masked_warning
from trainer.report.metrics import Metrics
from trainer.report.senders import Senders
from trainer.settings import Settings
from trainer.state.directory import alone, sweep

T = TypeVar("T")
_LATER_S = 60.0
"""How long a batch may take until it is reported to be awaited, once a step shows that agents earn groups."""


async def run(settings: Settings, *, from_older: bool = False) -> None:
    """Train until version `[run] steps` is published and acknowledged, as the first rank.

    `from_older`: a damaged newest checkpoint may be gone without. When cancelled, write a checkpoint first. Raise TrainerError or
    ChildDied.
    """
    trackers.check(settings.report.to)
    with alone(settings.run.dir):
        with reported(_to_stderr, f"the model of {settings.model.path} to load"):
            learner = await _opened(settings)
        try:
            await watch(_lead(settings, learner, from_older), heartbeat(learner))
        except asyncio.CancelledError:
            with suppress(RankLost):
                await asyncio.to_thread(dismiss, learner)
            raise
        await asyncio.to_thread(dismiss, learner)


def _to_stderr(text: str) -> None:
    """Report what takes long before there is a terminal's table."""
    sys.stderr.write(f"{text}\n")


async def _opened(settings: Settings) -> Learner:
    """The learner; its nodes are claimed before it takes their memory, which may be lent while no trainer is there.

    Nobody has lent them where the gateway is started by this trainer, afterwards.
    """
    given, opening = settings.gateway, partial(Learner.open, settings, older=True)
    if given.url is None or not given.nodes or offloaded_to(settings) is None:
        return await asyncio.to_thread(opening)
    async with GatewayClient(given.url, given.key) as client:
        nodes = Nodes(Feed(client, given.model, given.answer_s), given.nodes)
        await nodes.claim()
        return await watch(in_thread(opening), Watched("renewal of the claim", nodes.keep()))


async def _lead(settings: Settings, learner: Learner, from_older: bool) -> None:
    """All of a run that the first rank does beside its heartbeat."""
    async with AsyncExitStack() as stack:
        log = rollout_log(settings) if settings.rollout is not None else None
        metrics = stack.enter_context(
            Metrics(settings.run.dir, settings.run.steps, agents=log, senders=Senders(settings))
        )
        weights = sum(weight.numel() for weight in learner.policy.model.parameters())
        warnings = (lonely(settings), cpu_warning(settings, weights), seeing(learner), merging(settings))
        for warning in filter(None, warnings):
            metrics.say(warning)
        url, gateway = await gateway_process(stack, settings.gateway, settings.run.dir, metrics.say)
        metrics.watched_at(url)
        client = await stack.enter_async_context(GatewayClient(url, settings.gateway.key))
        trainer = Trainer(settings, learner, client, metrics, url, from_older=from_older)
        stack.push_async_callback(trainer.evaluations.close)
        stack.push_async_callback(trainer.step_events.close)
        server = await weights_process(stack, settings.weights, trainer.weights.directory, metrics.say)
        stack.push_async_callback(trainer.publication.close)
        await watch(trainer.check_versions(), trainer.keeper())
        rollout = await rollout_process(stack, settings, url)
        try:
            await watch(trainer.train(), gateway, server, rollout, trainer.keeper(), *trainer.aside())
        except asyncio.CancelledError:
            await trainer.before_stop()
            raise


def follow_first(settings: Settings) -> None:
    """Compute as another rank than the first until the run is over. Raise TrainerError; blocks, and ctrl-c ends it.

    SIGTERM does not: the first rank gets it too, writes a checkpoint with the others' help, and dismisses them.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    learner = Learner.open(settings, older=True)
    follow(learner)
    learner.ranks.leave()


def lonely(settings: Settings) -> str:
    """A warning where the agents' groups are of one episode, and the algorithm learns nothing from such; else empty."""
    rollout = settings.rollout
    if rollout is None or rollout.group_size > 1 or learns_from_equal(create(settings.algorithm)):
        return ""
    return (
        f"warning: [rollout] group_size = 1, and {settings.algorithm.type} compares the episodes of a group: every advantage is"
        " 0, and nothing will be learned"
    )


def seeing(learner: Learner) -> str:
    """Says how a vision model is trained; empty for any other."""
    if learner.vision_inputs is None:
        return ""
    vision = learner.settings.model.vision
    return (
        'the model takes images: every path is computed apart, by its own attention ([model] attention = "rows"), and the'
        f" part that sees is {vision} ([model] vision)"
    )


def merging(settings: Settings) -> str:
    """Return a warning where adapters are published merged into weights of fewer than 32 bits; else an empty string."""
    model = settings.model
    if model.lora is None or model.dtype == "float32" or settings.serves_adapters:
        return ""
    return (
        f"warning: versions are {model.dtype} weights with the adapters merged in, which rounds away much of what early steps"
        " learn (`merged_share` in metrics.jsonl is the share that survives). Publish the adapters alone: [weights] transport ="
        f' "lora" here, and at the gateway [engine] transport = "lora" with max_lora_rank = {model.lora.rank} or more'
    )


class Trainer:
    """One run of the loop against one gateway."""

    def __init__(
        self,
        settings: Settings,
        learner: Learner,
        client: GatewayClient,
        metrics: Metrics,
        url: str = "",
        *,
        from_older: bool = False,
    ) -> None:
        """`url`: the gateway's, for evaluations. `from_older`: a damaged newest checkpoint may be gone without."""
        self.settings = settings
        self.learner = learner
        self.metrics = metrics
        self.weights = WeightsDirectory(
            settings.run.dir.resolve() / "weights", settings.model.path, deltas=settings.weights.delta
        )
        self.feed = Feed(client, settings.gateway.model, settings.gateway.answer_s, metrics.say)
        self.images = EpisodeImages(self.feed, learner.images, learner.vision_inputs, metrics.say)
        self.nodes = Nodes(self.feed, settings.gateway.nodes, _memory(settings, learner))
        self.checkpoints = Checkpoints(learner, settings.checkpoint.every, settings.run.steps)
        named = RunName.of(settings)
        self.publication = Publication(settings.weights, learner, self.feed, self.weights, self.checkpoints)
        self.step_events = StepEvents(client, settings.gateway.model, metrics.say, named)
        at = url or settings.gateway.url or ""
        self.evaluations = Evaluations(settings, at, self.feed, metrics, self.step_events.tell)
        self.details = Details(settings)
        self.excluded = Excluded(settings.run.max_excluded)
        self.settled = Settled()
        self._from_older = from_older
        self._busy_s = 0.0
        """How long it computed on the groups of the last batch."""
        self._rest_s = 0.0
        """How long it was busy with the rest of that batch: all that was neither waiting nor computing on groups."""
        self._warned: set[str] = set()
        """Reasons of masked tokens that were warned of."""

    def keeper(self) -> Watched:
        """The task that keeps the claimed nodes."""
        return Watched("renewal of the claim", self.nodes.keep())

    def aside(self) -> tuple[Watched, Watched]:
        """The tasks that fail as soon as what is done beside training fails."""
        return self.checkpoints.watch(), self.publication.watch()

    async def check_versions(self) -> None:
        """Brings the learner to the newest version number that was used, by replay or by a new line.

        Removes first what killed processes left half-written. Raises GatewayAhead if there is no checkpoint, VersionRejected if
        the newest is of weights that the gateway refused, and ConfigError if the gateway drops groups that would teach, or its
        engines take rows of another length than `[model] max_model_len`.
        """
        for directory in (self.weights.directory, self.learner.checkpoints):
            await in_thread(sweep, directory)
        if self.nodes.memory is not None:
            # The weights are on the nodes; until they have left them, nobody else is to have these.
            await self.nodes.claim()
        if (why := self.weights.rejected(self.learner.version)) is not None:
            raise self.publication.rejected(why)
        status = await self.feed.status()
        self.settled.look(status.get("settled", {}))
        self._check_dropped(status["drop_equal"])
        self._check_length(status["max_model_len"])
        self.publication.begun = status["version"]
        published, consumed = status["newest_version"], status["consumed"]
        if said := await self.checkpoints.leave_damaged(consumed, from_older=self._from_older):
            self.metrics.say(said)
        used = max(published, self.weights.newest())
        if max(used, consumed) > self.learner.version:
            await self._catch_up(published, used, consumed)
        elif self.learner.saved is None:
            # Batches that are acknowledged before the first checkpoint name this one.
            await self.checkpoint()

    def _check_dropped(self, drop_equal: bool) -> None:
        """Refuses an algorithm whose mean over the batch would miss the groups that the gateway drops. Raises ConfigError."""
        if drop_equal and learns_from_equal(self.learner.algorithm):
            raise ConfigError(
                f"[algorithm] type = {self.settings.algorithm.type!r} compares each reward with those of the whole batch, and the"
                " gateway leaves groups of equal rewards out of it, which biases the mean: set [staleness] drop_equal = false in"
                " the gateway's file, or [algorithm] group_baseline = true"
            )

    def _check_length(self, engines: int) -> None:
        """Raise ConfigError if positions were made for another length than that of the engines' rows."""
        wanted = self.settings.model.max_model_len
        if wanted is not None and wanted != engines:
            raise ConfigError(
                f"[model] max_model_len = {wanted}, but engines take rows of {engines} tokens ([models.NAME] max_model_len in the"
                " gateway's file): set both alike"
            )

    async def _catch_up(self, published: int, used: int, consumed: int) -> None:
        """`used`: the newest version that was written; `consumed`: the one that the acknowledged batches make."""
        old = self.learner.version
        known = f"version {used} was published" if used > old else f"batch {consumed - 1} was trained"
        if self.learner.saved is None:
            raise GatewayAhead(
                f"{known} already, but there is no checkpoint under {self.learner.checkpoints}: bring one back, or give the"
                " gateway and the trainer a new run"
            )
        await self.nodes.claim()
        try:
            await replay.replay(self.learner, self.feed, self.images, self.weights, published, used, consumed)
        except replay.Impossible as reason:
            self.learner.renumber(max(used + 1, consumed))
            self.metrics.say(
                f"{known}, but the newest checkpoint is of version {old}: {reason}; going on from its weights as version"
                f" {self.learner.version}{replay.left_out(old, consumed)}"
            )
            await self.checkpoint()
            await self.publish()
        else:
            self.metrics.say(
                f"the batches since the checkpoint of version {old}, trained again, {replay.outcome(old, used, consumed)}:"
                " nothing lost, nothing trained twice"
            )
            await self.checkpoints.after_replay()

    async def train(self) -> None:
        """Leases and trains until the run is over."""
        await self.evaluations.resume()
        await self._look_at_failures()
        while True:
            self.metrics.waiting(self.learner.version, self.learner.steps)
            await self.nodes.release(self._busy_s, self._rest_s)
            self._busy_s = self._rest_s = 0.0
            if self.publication.begun < self.learner.version:
                await self._publish_first()
                continue
            over = self._is_over
            await self.evaluations.begin(self.learner.version, self.learner.steps, over)
            if over and await self.feed.acknowledged(self.learner.version - 1):
                await self.evaluations.finish()
                await self.step_events.finish()
                return
            clock = Clock()
            with clock.on("lease", "idle"):
                lease = await self.feed.lease()
            await watch(self._work(lease, clock), Watched("renewal of the lease", self.feed.renew()))

    @property
    def _is_over(self) -> bool:
        return self.learner.steps >= self.settings.run.steps

    async def _publish_first(self) -> None:
        """Publishes the version of a new start that a killed trainer did not bring to engines."""
        await self.evaluations.settle()
        await self.nodes.claim()
        await self._publish_beside()

    async def _publish_beside(self) -> None:
        """Begins to publish the current version; waits for engines only if they, or their nodes, are needed at once."""
        await self.publication.begin()
        over = self._is_over
        if over or self.settings.gateway.nodes or self.evaluations.is_due(self.learner.steps, over):
            await self.publication.finish()

    async def _work(self, lease: Lease, clock: Clock) -> None:
        version = self.learner.version
        if lease.buffer > version:
            raise GatewayAhead(
                f"the gateway leases buffer {lease.buffer}, but the trainer is at version {version}"
            )
        if lease.buffer < version:
            await self.publication.finish()
            await self._settle(lease.buffer)
            return
        try:
            what = f"agents to earn the {lease.size} groups of batch {lease.buffer}"
            after_s = _LATER_S if self.metrics.has_steps else SILENT_S
            with naming("stream"), reported(self.metrics.say, what, after_s):
                batch = await self.stream(clock)
            await self._look_at_failures()
            with clock.on("publish"):
                await self.publication.finish()
            with clock.on("step", "compute"):
                measured = await in_thread(self.learner.step, batch)
            measured |= self.excluded.figures() | self.settled.figures(measured)
            self._busy_s = clock.seconds["compute"] - clock.seconds["step"]
            self._warn(measured)
        finally:
            self.learner.discard()
        with clock.on("checkpoint"):
            await self.checkpoints.after_step()
        await self._settle_evaluation(clock)
        with clock.on("publish"):
            await self._publish_beside()
        with clock.on("ack"), naming("ack"):
            await self.ack()
        if batch.details.choice != DetailChoice():
            with clock.on("details"):
                await in_thread(self.details.write, self.learner.steps, batch)
        self._rest_s = clock.total - clock.seconds["idle"] - self._busy_s
        if self.nodes.memory is not None:
            clock.seconds |= {"offload": self.nodes.memory.free_s, "onload": self.nodes.memory.fill_s}
        figures = self.metrics.trained(version, measured, clock.seconds, clock.total, clock.spans)
        self.step_events.tell(self.learner.steps, version + 1, figures)
        await self._check_skipped()

    async def _look_at_failures(self) -> None:
        """Count the episodes and groups that ended. Raise TooManyExcluded, with the last error of an agent."""
        status = await self.feed.status()
        self.settled.look(status.get("settled", {}))
        try:
            self.excluded.look(status.get("ended", {}))
        except TooManyExcluded as error:
            last = await self.feed.last_failure(status["model"], error.reason)
            raise TooManyExcluded(f"{error}; {last}", error.reason) from error

    async def _check_skipped(self) -> None:
        """Says that the step was skipped, if it was. Raises NotFinite once too many in a row were, and engines run the last."""
        skipped, limit = self.learner.skipped, self.settings.optimizer.max_skipped_steps
        if not skipped:
            return
        version = self.learner.version
        self.metrics.say(
            f"loss or gradient is not finite: the step is skipped, and version {version} has the weights of version"
            f" {version - 1} ({skipped} in a row, the run stops at {limit})"
        )
        if skipped >= limit:
            await self.publication.finish()
            raise NotFinite(
                f"{skipped} steps in a row had a loss or gradient that is not finite ([optimizer] max_skipped_steps = {limit});"
                " none of them changed a weight, so the next start goes on from before them; lower [optimizer] lr or look at the"
                " rewards first"
            )

    def _warn(self, measured: dict[str, float]) -> None:
        """Says that a batch's tokens are masked, once for every reason."""
        warning = masked_warning(measured)
        if warning is not None and warning[0] not in self._warned:
            self._warned.add(warning[0])
            self.metrics.say(warning[1])

    async def _settle(self, buffer: int) -> None:
        """Ends the lease of a buffer below the version: acknowledged if its effect is in the weights, else given back.

        Raises FeedBroken if the gateway goes on to give that buffer.
        """
        if await self._has_trained(buffer):
            await self.ack()
            return
        why = (
            f"the weights of version {self.learner.version} were not trained on the groups of buffer {buffer}"
        )
        await self.feed.nack(why)
        if not await self.feed.acknowledged(buffer):
            raise FeedBroken(f"{why}, and the gateway does not pass the buffer over")
        self.metrics.say(f"{why}: given back, and never trained")

    async def _has_trained(self, buffer: int) -> bool:
        """True if the last step was trained on the groups of the leased buffer."""
        if (
            self.learner.groups is None
        ):  # a checkpoint without ids: this version was made by training the buffer of its parent
            return self.learner.parent == buffer
        fetched = await self.feed.groups(0, 0.0)
        return fetched.complete and sorted(group.group_id for group in fetched.groups) == [
            *self.learner.groups
        ]

    # The steps

    async def stream(self, clock: Clock) -> Batch:
        """Forward and backward over the buffer's groups as they become ready, once the nodes are held; leaves the gradient of
        their sum in the model."""
        await self.images.trim()
        batch = self.learner.begin(self.details.wanted(self.learner.steps + 1))
        cursor, limit = 0, self.settings.run.batch_wait_s
        gathered: tuple[Group, ...] = ()
        missing: frozenset[str] = frozenset()
        deadline = time.monotonic() + limit
        waits = ["first_group", "idle"]
        while True:
            with clock.on(*waits):
                fetched, claims = await self._fetch(cursor, bool(gathered))
            cursor, gathered = fetched.cursor, gathered + fetched.groups
            missing |= await self.images.fetch(fetched.groups)
            came = len(batch.group_ids) + len(gathered)
            self.metrics.collected(came, self.feed.held.size)
            if claims:
                await self._settle_evaluation(clock)  # it needs engines, which may be put to sleep now
                with clock.on("claim", "idle"):
                    await self.nodes.claim()
            if self.nodes.held:
                with clock.on("stream", "compute"):
                    if missing:
                        await in_thread(self.learner.miss, batch, missing)
                    await in_thread(self.learner.take, batch, gathered)
                gathered, missing = (), frozenset()
            if fetched.complete:
                return batch
            if came:
                waits = ["stream", "idle"]
            if not fetched.groups:
                await self._look_at_failures()
            if not fetched.groups and time.monotonic() > deadline:
                got = f"{came} of {self.feed.held.size} groups came"
                raise StepTimeout("stream", limit, got)

    async def _fetch(self, cursor: int, gathered: bool) -> tuple[LeasedGroups, bool]:
        """Groups after `cursor`, maybe none, and whether to claim the nodes now: for those that are there, or the whole batch."""
        until = time.monotonic() + feed.POLL_S
        while True:
            looks = gathered and not self.nodes.held
            fetched = await self.feed.groups(cursor, feed.LOOK_S if looks else None)
            there = gathered or bool(fetched.groups)
            if not self.nodes.held and (fetched.complete or (there and await self.nodes.called_back())):
                return fetched, True
            if fetched.groups or fetched.complete or time.monotonic() > until:
                return fetched, False

    async def _settle_evaluation(self, clock: Clock) -> None:
        """Waits until the evaluation of this version lets the engines change."""
        if self.evaluations.under_way:
            with clock.on("evaluation", "idle"):
                await self.evaluations.settle()

    async def checkpoint(self) -> None:
        """Writes the checkpoint from which the steps before need never be repeated."""
        await self.checkpoints.write()

    async def before_stop(self) -> None:
        """Write what a start would have to train again, and say so if that cannot be."""
        try:
            await self.checkpoints.before_stop()
        except TrainerError as error:
            self.metrics.say(f"stopped without a last checkpoint: {error}")

    async def publish(self) -> None:
        """Brings the current version to the engines, unless they have it, and waits until they run it."""
        await self.publication.begin()
        await self.publication.finish()

    async def ack(self) -> None:
        """Says that the buffer was trained: the newest checkpoint, with the recorded batches since, gives its effect again."""
        assert self.learner.saved is not None
        path = self.learner.checkpoints / folders.name_of(self.learner.saved.version)
        await self.feed.ack(str(path))


def _memory(settings: Settings, learner: Learner) -> Memory | None:
    """How the learner leaves the memory of nodes that are released (`[gateway] offload`); None if it stays."""
    where, directory = offloaded_to(settings), settings.gateway.offload_dir or settings.run.dir
    return None if where is None else Memory(partial(learner.offload, where, directory), learner.onload)


def offloaded_to(settings: Settings) -> Where | None:
    """Where weights are while the nodes are released; None if they stay."""
    wanted = settings.gateway.offload
    if wanted == "auto":
        return None if device_of(settings) == "cpu" else "host"
    return None if wanted == "none" else wanted
