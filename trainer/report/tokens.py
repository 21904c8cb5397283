"""The tokens of a batch as a table: the step's inputs and results for each.

One row for each sampled token, in the order of groups, episodes, nodes and tokens. Pure, but for `write`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from headgate.trees import untrained
from headgate.types import Episode, Node
from trainer.data.details import BatchDetails, Figures
from trainer.data.tree import Credit
from trainer.report.files import atomic_file

EQUAL_REWARDS = "equal_rewards"
"""The reason for which tokens of a group without gradient are not trained."""
RATIO = "ratio"
"""The reason for which a mask of `[algorithm]` left a token out that was computed."""
_WORDS = ("group_id", "episode_id", "call_id", "mask_reason")
_COMPUTED = ("logprob", "entropy", "weight")


@dataclass(slots=True)
class _Table:
    """The columns while they grow, one array for each node."""

    columns: dict[str, list[npt.NDArray[Any]]] = field(default_factory=dict)
    starts: dict[tuple[str, int], int] = field(default_factory=dict)
    """By episode and node: the row of a token, less its position on its path."""
    words: dict[str, dict[str, int]] = field(default_factory=lambda: {name: {"": 0} for name in _WORDS})
    """The code of each word of a column."""
    rows: int = 0

    def add(self, n: int, **values: npt.NDArray[Any]) -> None:
        """Add n rows."""
        for name, value in values.items():
            self.columns.setdefault(name, []).append(value)
        self.rows += n

    def code(self, column: str, word: str) -> int:
        """Return the code of a word; 0 for the empty one, which is null."""
        return self.words[column].setdefault(word, len(self.words[column]))

    def joined(self, name: str, dtype: Any) -> npt.NDArray[Any]:
        """Return a column as one array."""
        return np.concatenate([np.empty(0, dtype), *self.columns.get(name, [])])

    def words_of(self, name: str, codes: npt.NDArray[Any]) -> pa.DictionaryArray:
        """Return the words of a column."""
        words = pa.array([*self.words[name]], pa.string())
        return pa.DictionaryArray.from_arrays(pa.array(codes, mask=codes == 0), words)


def token_table(details: BatchDetails) -> pa.Table:
    """Return the table of a batch of which everything was kept (`DetailChoice.tokens`).

    Columns: `group_id`, `episode_id`, `call_id`, `node`, `position` (tokens before it on its path), `token`, `version` (that
    sampled it), `recorded_logprob` (nats), `advantage`, `mask_reason` (null: trained). Of tokens that the loss saw, else null:
    `logprob`, `entropy`, `weight` (the importance weight; 0 by a mask), `mismatch` (`logprob` - `recorded_logprob`), `clipped`.
    """
    table = _Table()
    for group, credits in details.groups:
        why = "" if any(value for given in credits for value in given.values()) else EQUAL_REWARDS
        for episode, credit in zip(group.episodes, credits, strict=True):
            for node, depth in _sampled(episode):
                table.starts[episode.episode_id, node.index] = table.rows - depth
                _add(table, node, depth, group.group_id, episode.episode_id, credit, why)
    computed = _computed(table, details.figures)
    has_figures = computed["has_figures"]
    # With a KL term or an entropy bonus, a group without advantage is trained as well.
    reasons = np.where(has_figures, 0, table.joined("mask_reason", np.int32))
    reasons[computed["masked"]] = table.code("mask_reason", RATIO)
    recorded = table.joined("recorded_logprob", np.float32)
    values = {
        **{name: table.words_of(name, table.joined(name, np.int32)) for name in _WORDS[:3]},
        **{name: pa.array(table.joined(name, np.int32)) for name in ("node", "position", "token", "version")},
        "recorded_logprob": pa.array(recorded),
        "advantage": pa.array(computed["advantage"]),
        **{name: pa.array(computed[name], mask=~has_figures) for name in _COMPUTED},
        "mismatch": pa.array(computed["logprob"] - recorded, mask=~has_figures),
        "clipped": pa.array(computed["clipped"], mask=~has_figures),
        "mask_reason": table.words_of("mask_reason", reasons),
    }
    return pa.table(values)


def _sampled(episode: Episode) -> Iterator[tuple[Node, int]]:
    """Yield the sampled nodes of an episode, each with the tokens before it on its path."""
    depths: dict[int, int] = {}
    for node in episode.nodes:
        depths[node.index] = depths.get(node.parent, 0) + node.at
        if node.sampled:
            yield node, depths[node.index]


def _add(table: _Table, node: Node, depth: int, group: str, episode: str, credit: Credit, why: str) -> None:
    n = len(node.ids)
    names = {"group_id": group, "episode_id": episode, "call_id": node.call_id, "mask_reason": why}
    words = {name: np.full(n, table.code(name, word), np.int32) for name, word in names.items()}
    for reason, tokens in untrained(node):
        words["mask_reason"][tokens] = table.code("mask_reason", reason)
    table.add(
        n,
        **words,
        node=np.full(n, node.index, np.int32),
        position=np.arange(depth, depth + n, dtype=np.int32),
        token=node.ids.astype(np.int32),
        version=node.versions.astype(np.int32),
        recorded_logprob=node.logprobs.astype(np.float32),
        advantage=np.full(n, credit.get(node.index, 0.0)),
    )


def _computed(table: _Table, figures: Sequence[Figures]) -> dict[str, npt.NDArray[Any]]:
    """Return the computed figures of each row's token; `has_figures` is true if it has some. Advantages are the used ones."""
    dtype = figures[0].logprobs.dtype if figures else np.dtype(np.float32)
    found: dict[str, npt.NDArray[Any]] = {name: np.zeros(table.rows, dtype) for name in _COMPUTED}
    found |= {name: np.zeros(table.rows, np.bool_) for name in ("clipped", "masked", "has_figures")}
    found["advantage"] = table.joined("advantage", np.float64)
    for some in figures:
        places = np.stack([some.sequences, some.nodes], axis=1)
        different, which = np.unique(places, axis=0, return_inverse=True)
        starts = np.array([table.starts[some.episodes[s], int(node)] for s, node in different], np.int64)
        rows = starts[which.reshape(-1)] + some.positions
        for name, values in (
            ("logprob", some.logprobs),
            ("entropy", some.entropy),
            ("weight", some.weights),
            ("advantage", some.advantages),
            ("clipped", some.clipped),
            ("masked", some.masked),
            ("has_figures", True),
        ):
            found[name][rows] = values
    return found


def write(path: Path, table: pa.Table, metadata: dict[str, int]) -> None:
    """Write the table as Parquet, atomically, with `metadata` under the key `headgate` of the file's metadata."""
    with atomic_file(path) as temporary:
        pq.write_table(
            table.replace_schema_metadata({"headgate": json.dumps(metadata)}), temporary, compression="zstd"
        )
