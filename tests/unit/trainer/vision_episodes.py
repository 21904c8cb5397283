"""Episodes with images, files of them in a run's folder, and what transformers' own model and processor compute of them."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from headgate.types import Episode, Group, ImageSpan, Node
from tests.harness.vision_model import END, PAD, START, png
from tests.unit.trainer.runs import offline_settings
from tests.unit.trainer.trees import prompt, sampled
from trainer.config.settings import Settings
from trainer.data.tree import Row, rows_of
from trainer.rank_trainer import RankTrainer

RED, GREEN, BLUE = png(56, 84, (255, 0, 0)), png(56, 84, (0, 255, 0)), png(97, 41, (0, 30, 255))
LENGTHS = {RED: 6, GREEN: 6, BLUE: 3}
"""The tokens of each, where two patches on a side are merged."""


def name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def look(index: int, parent: int, at: int, data: bytes, *, before: Sequence[int] = ()) -> Node:
    """A prompt with an image and a word."""
    n = LENGTHS[data]
    ids = [*before, START, *[PAD] * n, END, 7]
    seen = ImageSpan(name_of(data), len(before) + 1, n)
    return replace(prompt(index, parent, at, ids), images=(seen,))


def two_turns(name: str, reward: float = 1.0, images: tuple[bytes, bytes] = (RED, BLUE)) -> Episode:
    """An episode that sees an image before each of its two turns."""
    rng = np.random.default_rng(int(name_of(name.encode())[:8], 16))
    replies = [rng.integers(0, 250, 4).tolist() for _ in range(2)]
    first = look(0, -1, 0, images[0], before=[1, 2])
    turn = sampled(1, 0, len(first.ids), replies[0], logprob=-5.5)
    second = look(2, 1, 4, images[1])
    return Episode(
        name, reward, (first, turn, second, sampled(3, 2, len(second.ids), replies[1], logprob=-5.5))
    )


def groups_with_images(version: int) -> list[Group]:
    """Groups of unlike length, two thirds of whose episodes see images."""
    groups = []
    for g in range(3):
        name, rng = f"{version}-{g}", np.random.default_rng(version * 10 + g)
        words = sampled(1, 0, 3, rng.integers(0, 250, 5 + g).tolist(), logprob=-5.5, version=version)
        text = Episode(f"{name}-text", float(rng.normal()), (prompt(0, -1, 0, [g + 1, 7, 9]), words))
        pictures = (RED, BLUE) if g else (GREEN, BLUE)
        seen = [two_turns(f"{name}-{e}", float(rng.normal()), pictures) for e in range(2)]
        groups.append(Group(f"g{name}", f"g{name}", version, (*seen, text)))
    return groups


def settings_of(path: Path, work: Path, *, more: Mapping[str, Any] | None = None, **model: Any) -> Settings:
    """Settings of a short run; `model`: more of `[model]`, `more`: other tables."""
    tables = {"model": {"attention": "rows", **model}, "batch": {"tokens": 40}}
    return offline_settings(path, work, **tables, **(more or {}))


def keep(trainer: RankTrainer, *files: bytes) -> None:
    """Puts files where the loop would have put them."""
    for data in files or (RED, GREEN, BLUE):
        trainer.images.write(name_of(data), data)


def rows(episode: Episode, trainer: RankTrainer) -> list[Row]:
    assert trainer.vision_inputs is not None
    credit = {node.index: 1.0 for node in episode.nodes}
    return rows_of([(episode, credit)], image_support=trainer.vision_inputs.image_support).rows


def plain(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model as transformers loads it."""
    return AutoModelForImageTextToText.from_pretrained(directory).to(dtype).eval()


def own_logprobs(model: Any, directory: Path, row: Row, files: Mapping[str, bytes]) -> Tensor:
    """The model's own log-probabilities of a row's trained tokens."""
    pictures = [Image.open(io.BytesIO(files[image.hash])) for image in row.images]
    seen = AutoImageProcessor.from_pretrained(directory)(pictures, return_tensors="pt") if pictures else {}
    ids = torch.tensor(row.ids[None].astype(np.int64))
    kinds = {"mm_token_type_ids": (ids == PAD).int()} if pictures else {}
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **kinds, **seen).logits[0, :-1]
    logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None])[:, 0][torch.tensor(row.train[1:])]
