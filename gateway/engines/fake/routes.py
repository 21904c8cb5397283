"""The experts that the fake engine's tokens go through: a pure function of the weights, the position and the token."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from pathlib import Path

import numpy as np

from headgate.routes import RouterShape, router_shape


def token_routes(weights_id: str, position: int, token: int, routers: RouterShape) -> list[list[int]]:
    """Return the experts of one token in each layer; like vLLM, of those without a router too, where they mean nothing."""
    key = f"{weights_id}:{position}:{token}".encode()
    draw = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
    rows = [[0] * routers.top_k for _ in range(routers.total_layers)]
    for layer in routers.layers:
        rows[layer] = [(draw + 7 * layer + k) % routers.experts for k in range(routers.top_k)]
    return rows


def routers_in(weights: str) -> RouterShape:
    """Return the routers of the checkpoint in a folder. Raise ValueError if it is of no mixture."""
    found = router_shape(json.loads((Path(weights) / "config.json").read_bytes()))
    if found is None:
        raise ValueError("AuxOutput Connector only supports MoE models.")  # in vLLM's words
    return found


def as_npy(routes: list[list[list[int]]]) -> str:
    """Return rows in the form of vLLM."""
    file = io.BytesIO()
    np.save(file, np.asarray(routes, np.uint16), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()
