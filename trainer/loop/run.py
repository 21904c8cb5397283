"""`trainer run`: opens the trainer of each rank, the gateway and the other processes, and runs the loop on rank 0.

Owns the child processes (`children`) and the order of start and end.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import AsyncExitStack, suppress
from functools import partial

from headgate.client import GatewayClient
from headgate.processes.slow import reported
from headgate.used_settings import write_used
from trainer import rank_rpc
from trainer.algorithms import learns_from_equal
from trainer.config.settings import Settings
from trainer.errors import RankLost
from trainer.loop.children import gateway_process, rollout_log, rollout_process, weights_process
from trainer.loop.feed import Feed
from trainer.loop.nodes import Nodes, offload_target
from trainer.loop.tasks import Companion, in_thread, run_with_companions
from trainer.loop.training_loop import TrainingLoop
from trainer.model.device import cpu_warning
from trainer.rank_trainer import RankTrainer
from trainer.report import trackers
from trainer.report.metrics import Metrics
from trainer.report.tracking import Trackers
from trainer.state.directory import exclusive


async def run(settings: Settings, *, from_older: bool = False) -> None:
    """Train as rank 0 until version `[run] steps` is published and acknowledged.

    `from_older`: continue without a damaged newest checkpoint. When cancelled, write a checkpoint first. Raise TrainerError or
    ChildDied.
    """
    trackers.check(settings.report.trackers)
    with exclusive(settings.run.dir):
        with reported(_to_stderr, f"the model of {settings.model.path} to load"):
            trainer = await _open_trainer(settings)
        heartbeats = None
        if trainer.ranks.size > 1:
            heartbeats = Companion("heartbeat of the ranks", rank_rpc.send_heartbeats(trainer))
        try:
            await run_with_companions(_run_rank_zero(settings, trainer, from_older), heartbeats)
        except asyncio.CancelledError:
            with suppress(RankLost):
                await asyncio.to_thread(rank_rpc.shutdown_ranks, trainer)
            raise
        await asyncio.to_thread(rank_rpc.shutdown_ranks, trainer)


def _to_stderr(text: str) -> None:
    """Report what takes long before the terminal's table exists."""
    sys.stderr.write(f"{text}\n")


async def _open_trainer(settings: Settings) -> RankTrainer:
    """Return the trainer; claim its nodes before it allocates their memory, because they may be lent while no trainer runs.

    A gateway that this trainer starts later has not lent them.
    """
    gateway, opening = settings.gateway, partial(RankTrainer.open, settings, older=True)
    if gateway.url is None or not gateway.nodes or offload_target(settings) is None:
        return await asyncio.to_thread(opening)
    async with GatewayClient(gateway.url, gateway.key) as client:
        nodes = Nodes(Feed(client, gateway.model, gateway.timeout_s), gateway.nodes)
        await nodes.claim()
        return await run_with_companions(in_thread(opening), Companion("renewal of the claim", nodes.renew()))


async def _run_rank_zero(settings: Settings, trainer: RankTrainer, from_older: bool) -> None:
    """Do all of a run that rank 0 does in addition to its heartbeats."""
    async with AsyncExitStack() as stack:
        log = rollout_log(settings) if settings.rollout is not None else None
        metrics = stack.enter_context(
            Metrics(settings.run.dir, settings.run.steps, agents=log, trackers=Trackers(settings))
        )
        write_used(settings.run.dir, "trainer", settings)
        weights = sum(weight.numel() for weight in trainer.policy.model.parameters())
        warnings = (
            warn_single_episode_groups(settings),
            cpu_warning(settings, weights),
            describe_vision(trainer),
            warn_merged_adapters(settings),
        )
        for warning in filter(None, warnings):
            metrics.notify(warning)
        url, gateway = await gateway_process(stack, settings.gateway, settings.run.dir, metrics.notify)
        metrics.watched_at(url)
        client = await stack.enter_async_context(GatewayClient(url, settings.gateway.key))
        loop = TrainingLoop(settings, trainer, client, metrics, url, from_older=from_older)
        stack.push_async_callback(loop.evaluations.close)
        stack.push_async_callback(loop.step_events.close)
        server = await weights_process(stack, settings.publish, loop.weights.directory, metrics.notify)
        stack.push_async_callback(loop.publication.close)
        await run_with_companions(loop.check_versions(), loop.node_claim_task())
        rollout = await rollout_process(stack, settings, url)
        companions = (gateway, server, rollout, loop.node_claim_task(), *loop.background_tasks())
        try:
            await run_with_companions(loop.train(), *companions)
        except asyncio.CancelledError:
            await loop.before_stop()
            raise


def run_other_rank(settings: Settings) -> None:
    """Compute as another rank than 0 until the run ends. Raise TrainerError; blocks, and Ctrl-C ends it.

    SIGTERM does not end it: rank 0 receives it too, writes a checkpoint with the others' help, and shuts them down.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    trainer = RankTrainer.open(settings, older=True)
    rank_rpc.serve_commands(trainer)
    trainer.ranks.close()


def warn_single_episode_groups(settings: Settings) -> str:
    """Return a warning if groups have one episode and the algorithm learns nothing from such groups; else an empty string."""
    rollout = settings.rollout
    if rollout is None or rollout.group_size > 1 or learns_from_equal(settings.algorithm.create()):
        return ""
    return (
        f"warning: [rollout] group_size = 1, and {settings.algorithm.type} compares the episodes of a group: every advantage is"
        " 0, and nothing will be learned"
    )


def describe_vision(trainer: RankTrainer) -> str:
    """Return how a vision model is trained; an empty string for any other model."""
    if trainer.vision_inputs is None:
        return ""
    vision = trainer.settings.model.vision
    return (
        'the model accepts images: every path is computed separately, by its own attention ([model] attention = "rows"), and its'
        f" vision tower is {vision} ([model] vision)"
    )


def warn_merged_adapters(settings: Settings) -> str:
    """Return a warning if adapters are published merged into weights of fewer than 32 bits; else an empty string."""
    model = settings.model
    if model.lora is None or model.dtype == "float32" or settings.serves_adapters:
        return ""
    return (
        f"warning: versions are {model.dtype} weights with the adapters merged in, which rounds away much of what early steps"
        " learn (`merged_share` in metrics.jsonl is the share that survives). Publish only the adapters: [publish] transport ="
        f' "lora" here, and at the gateway [engine] transport = "lora" with max_lora_rank = {model.lora.rank} or more'
    )
