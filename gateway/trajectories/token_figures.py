"""The figures that a trainer computed of an episode's tokens, from the table that it writes next to its metrics
(`[report] tokens_every`): read on the machine where the file is, by column, in the order of `token_columns`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gateway.trajectories.token_columns import TokenColumns, code, depths
from headgate.types import Node

FIGURES = ("logprob", "entropy", "advantage", "weight", "mismatch", "clipped")
_PLACES = ("node", "position", "mask_reason")
OFF = "the trainer writes figures by token for every N-th step ([report] tokens_every, 10 by default), and keeps the newest"


def tokens_file(folder: Path, step: int) -> Path:
    """Return the file of a step's figures by token, in the folder of its run."""
    return folder / "tokens" / f"step-{step:06d}.parquet"


def read_figures(
    path: Path, episode_id: str, nodes: Sequence[Node], columns: TokenColumns
) -> dict[str, list[Any]] | None:
    """Return the figures of an episode's tokens, None where a token has none; sets the masks that the trainer applied.

    None if the file has nothing of the episode, or not of the tokens that are stored. Blocks; raises OSError, and ValueError for
    a file that is not such a table.
    """
    import pyarrow.parquet as pq  # pyarrow takes 40 MiB, and not every gateway has a trainer

    table = pq.read_table(
        path, columns=[*_PLACES, *FIGURES, "token"], filters=[("episode_id", "==", episode_id)]
    )
    if not table.num_rows:
        return None
    rows = _rows(nodes, columns, table["node"].to_numpy(), table["position"].to_numpy())
    here = rows >= 0
    ids = np.asarray(columns.ids, np.int64)
    if (ids[rows[here]] != table["token"].to_numpy()[here]).any():
        return None
    for row, reason in zip(rows.tolist(), table["mask_reason"].to_pylist(), strict=True):
        if row >= 0:
            columns.mask[row] = code(columns.mask_reasons, reason or "")
    found: dict[str, list[Any]] = {}
    for name in FIGURES:
        values: list[Any] = [None] * columns.count
        for row, value in zip(rows.tolist(), table[name].to_pylist(), strict=True):
            if row >= 0 and value is not None:
                values[row] = int(value) if name == "clipped" else _short(value)
        found[name] = values
    return found


def _rows(
    nodes: Sequence[Node], columns: TokenColumns, node: npt.NDArray[Any], position: npt.NDArray[Any]
) -> npt.NDArray[np.int64]:
    """Return the place in the columns of each row of the table; -1: of none of their nodes."""
    before, most = depths(nodes), max((n.index for n in nodes), default=-1)
    starts = np.full(most + 2, np.iinfo(np.int32).min, np.int64)
    for described in columns.nodes:
        starts[described["index"]] = described["start"] - before[described["index"]]
    rows = starts[np.minimum(node, most + 1)] + position
    return np.where((rows >= 0) & (rows < columns.count), rows, -1)


def _short(value: float) -> float | None:
    """Six digits: what a person reads, at a third of the length."""
    return float(f"{value:.6g}") if np.isfinite(value) else None
