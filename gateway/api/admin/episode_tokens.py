"""`/admin/v1/episodes/{id}/tokens`: an episode's tokens by column, with what the trainer computed of them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import orjson
from fastapi import Header, Query, Response
from sqlalchemy import Connection

from gateway.api.access import Access, Admin
from gateway.api.admin.admin_route import admin_router
from gateway.control.read_model import ShownModel
from gateway.observe.explain import explain
from gateway.store import decisions, trainer_steps, turns
from gateway.trajectories.token_columns import FLAG_NAMES, TokenColumns, Vocabulary, token_columns
from gateway.trajectories.token_figures import OFF, read_figures, tokens_file
from headgate.types import Node

router = admin_router("Episodes", "/episodes")


@router.get("/{episode_id}/tokens")
async def get_tokens(
    episode_id: str,
    access: Admin,
    model: str | None = None,
    from_node: Annotated[int, Query(ge=0, lt=2**31, description="Only the nodes from this one on.")] = 0,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """Return the tokens of the episode's tree by column (`text`, `ids`, `logprob`, `version`, `flags`, `mask`), node by node.

    `trained` has the trainer's figures, where the batch's are written ([report] tokens_every) and this machine has the file;
    otherwise `untrained_why` states why there are none.
    """
    row = await access.episode(episode_id)
    found = access.called(model or row["model"], row["model"])
    nodes, step = await access.gateway.database.read(lambda c: _read(c, found.name, episode_id))
    nodes = _marked(access, found.name, nodes, step)
    folders = _folders(access, step)
    given: Vocabulary = found.renderer
    columns, figures, why = await asyncio.to_thread(
        _columns, given, nodes, from_node, episode_id, step, folders
    )
    body = {
        "episode_id": episode_id,
        "model": found.name,
        "state": row["state"],
        "reward": row["reward"],
        **asdict(columns),
        "flag_names": FLAG_NAMES,
        "trained": figures,
        "untrained_why": why,
    }
    return _tagged(orjson.dumps(body), if_none_match)


Step = dict[str, Any] | None
"""The step that trained on an episode: `batch`, and what is stored of the step."""


def _read(connection: Connection, model: str, episode_id: str) -> tuple[Sequence[Node], Step]:
    nodes = turns.nodes(connection, model, [episode_id])[episode_id]
    rows = [each for each in decisions.of_episode(connection, episode_id) if each["model"] == model]
    story = explain(rows, episode_id) if any(r["episode_id"] == episode_id for r in rows) else []
    trained = next((s for s in reversed(story) if s["kind"] == "trained"), None)
    if trained is None or episode_id not in trained["details"].get("episodes", ()):
        return nodes, None
    batch = trained["batch"]
    known = trainer_steps.of_version(connection, model, batch + 1)
    return nodes, {"batch": batch, "version": batch + 1, **(known or {})}


def _marked(access: Access, model: str, nodes: Sequence[Node], step: Step) -> Sequence[Node]:
    """Return the nodes with the flags that are only known now."""
    trained = next((each for each in access.gateway.view.served_models() if each.name == model), None)
    if not isinstance(trained, ShownModel):
        return nodes
    return trained.batches.reader.marked(nodes, -1 if step is None else step["batch"])


def _folders(access: Access, step: Step) -> list[Path]:
    folders = [] if step is None or not step.get("folder") else [Path(step["folder"])]
    return [*access.gateway.run_folders, *folders]


def _columns(
    vocabulary: Vocabulary,
    nodes: Sequence[Node],
    first: int,
    episode_id: str,
    step: Step,
    folders: Sequence[Path],
) -> tuple[TokenColumns, dict[str, Any] | None, str]:
    """Return the columns, the trainer's figures, and why there are none."""
    columns = token_columns(nodes, vocabulary, first)
    if step is None:
        return columns, None, "no batch was trained on this episode"
    if "step" not in step:
        return columns, None, f"no trainer has reported the step that made version {step['version']}"
    files = [tokens_file(folder, step["step"]) for folder in folders]
    path = next((path for path in files if path.is_file()), None)
    if path is None:
        looked = f"; looked for {files[0]}" if files else ""
        return columns, None, f"step {step['step']} has no figures by token here: {OFF}{looked}"
    try:
        found = read_figures(path, episode_id, nodes, columns)
    except (OSError, ValueError, KeyError) as error:
        return columns, None, f"{path} cannot be read: {error}"
    if found is None:
        return columns, None, f"{path} has nothing of this episode"
    source = {"run": step["run"], "step": step["step"], "batch": step["batch"], "version": step["version"]}
    return columns, {**source, **found}, ""


def _tagged(body: bytes, known: str | None) -> Response:
    """Return the body, or 304 for who has it already."""
    tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    headers = {"etag": tag, "cache-control": "private, no-cache"}
    if known is not None and tag in known:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type="application/json")
