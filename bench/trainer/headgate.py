"""Our side of the trainer's bench: the trainer on a recorded batch, a step for each line of stdin.

The same commands and answers as `bench.trainer.trl`. A step is all that the trainer does for a batch: packing, forward and
backward passes, the clip, the optimizer, and the probe of the new version.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.trainer.load import Rollout, load, paths_of
from headgate.routes import PackedRoutes, dtype_of, pack, router_shape
from headgate.types import (
    Episode,
    Group,
    Node,
)
from trainer.config.settings import Settings
from trainer.model import parallel
from trainer.model.device import prepare_torch
from trainer.rank_trainer import RankTrainer

CLIP_LOW, CLIP_HIGH = 0.2, 0.28


def groups_of(rollouts: list[Rollout]) -> list[Group]:
    """Return the batch as a gateway sends it."""
    found = []
    for name, members in itertools.groupby(rollouts, key=lambda rollout: rollout.group):
        episodes = (Episode(f"{name}-{i}", member.reward, _nodes(member)) for i, member in enumerate(members))
        found.append(Group(str(name), str(name), 0, tuple(episodes)))
    return found


def _nodes(rollout: Rollout) -> tuple[Node, ...]:
    made = []
    for index, turn in enumerate(rollout.turns):
        size = len(turn.ids) if turn.sampled else 0
        at = len(rollout.turns[turn.parent].ids) if turn.parent >= 0 else 0
        known = turn.logprobs[:size], np.zeros(size, np.int32), np.zeros(size, np.uint8)
        made.append(Node(index, turn.parent, at, turn.sampled, turn.ids, *known))
    return tuple(made)


def routed(groups: list[Group], model: Path) -> list[Group]:
    """Return groups whose tokens have recorded experts, random ones of the mixture `model`."""
    shape, draw = router_shape(json.loads((model / "config.json").read_text())), np.random.default_rng(4)
    assert shape is not None

    def with_routes(node: Node) -> Node:
        first = draw.integers(0, shape.experts, (len(node.ids), len(shape.layers), 1))
        chosen = (first + np.arange(shape.top_k)) % shape.experts
        packed = PackedRoutes(
            pack(chosen, shape.experts), len(shape.layers), shape.top_k, dtype_of(shape.experts)
        )
        return replace(node, routes=packed)

    def of(episode: Episode) -> Episode:
        return replace(episode, nodes=tuple(map(with_routes, episode.nodes)))

    return [replace(group, episodes=tuple(map(of, group.episodes))) for group in groups]


def settings_of(
    model: str, tokens: int, threads: int, folder: Path, attention: str = "spans", *, replay: bool = False
) -> Settings:
    """Return a trainer with TRL's loss `dapo`, whose importance weight is clipped and not truncated."""
    return Settings.parse({
        "run": {"dir": folder, "steps": 1_000_000, "device": "cpu", "threads": threads},
        "gateway": {"url": "http://127.0.0.1:9"},
        "model": {"path": model, "attention": attention, "router_replay": replay},
        "optimizer": {"lr": 1e-6},
        "batch": {"tokens": tokens},
        "algorithm": {"type": "grpo", "clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "importance_cap": float("inf")},
    })  # fmt: skip


class Counted:
    """The tokens that went through a model's layers in gradient passes, padding included."""

    def __init__(self, model: Any) -> None:
        self.tokens = 0
        model.get_input_embeddings().register_forward_pre_hook(self._see)

    def _see(self, _: Any, arguments: tuple[torch.Tensor]) -> None:
        if torch.is_grad_enabled():
            self.tokens += arguments[0].numel()


def main() -> None:
    """Train once for each line of standard input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=Path, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="of a micro-batch")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument(
        "--paths",
        action="store_true",
        help="each path of an episode as a row of its own, of which none is shared",
    )
    parser.add_argument("--replay", action="store_true", help="replay recorded experts")
    parser.add_argument("--gradient", type=Path)
    options = parser.parse_args()
    rollouts = load(options.batch)
    way = "rows" if options.paths else "spans"  # spans would find what rows share
    folder = options.batch.parent / "run"
    settings = settings_of(options.model, options.tokens, options.threads, folder, way, replay=options.replay)
    prepare_torch(settings)
    trainer = RankTrainer(settings, parallel.join(settings.parallel, "cpu"))
    counted = Counted(trainer.model)
    if options.gradient:

        def write(*_: Any) -> None:
            grads = {name: p.grad.numpy() for name, p in trainer.model.named_parameters()}
            np.savez(options.gradient, **grads)
            hook.remove()

        hook = trainer.optimizer.parts[0].register_step_pre_hook(write)
    groups = groups_of(paths_of(rollouts) if options.paths else rollouts)
    if options.replay:
        groups = routed(groups, Path(options.model))
    while sys.stdin.readline():
        counted.tokens = 0
        began = time.perf_counter(), time.process_time()
        result = trainer.train(groups)
        took = time.perf_counter() - began[0], time.process_time() - began[1]
        answer = {
            "seconds": took[0],
            "cpu_s": took[1],
            "tokens": counted.tokens,
            "trained": result["trained_tokens"],
        }
        print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
