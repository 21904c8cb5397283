"""The experts of a mixture that each token went through, and the form in which they travel from engine to trainer.

The routes of a sequence are an array of shape [tokens, layers, top_k]. Gateway and trainer agree on these rules:

- **Row i belongs to input position i**: the experts that token i went through when the engine computed its hidden state, which
  predicts token i + 1. So the version whose routes row i has is the one that sampled token i + 1.
- The last sampled token of a turn is an input only if a later turn's prompt continues it. Its row is absent until then.
- `layers` counts only layers that have a router, in the model's order; the entries of a row are the router's order.
- An absent row (the routes are not known) is -1 in every entry in memory, and all ones (255 or 65535) in every entry when packed.
  A row with fewer ones is a real one: expert 255 of 256 is packed as 255 too.
- Packed means little-endian, in C order, uint8 for up to 256 experts and uint16 above.

In a feed, the column `routed_experts` of a row has the routes of exactly this row's tokens (`ids`), packed; null if none are
known. The schema's metadata has `SHAPE_KEY`, as JSON: {"layers": L, "top_k": K, "dtype": "uint8" or "uint16"}.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Routes = npt.NDArray[np.int32]
SHAPE_KEY = "routed_experts_shape"
ABSENT = -1
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "top_k_experts",
    "moe_k",
    "moe_topk",
)
_DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_EVERY = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
"""The words of the families."""
_DTYPES: dict[str, np.dtype[np.unsignedinteger[Any]]] = {"uint8": np.dtype("u1"), "uint16": np.dtype("<u2")}


class RouterShape(NamedTuple):
    """The routers of a model."""

    layers: tuple[int, ...]
    """The indices of the layers that have a router."""
    top_k: int
    experts: int
    total_layers: int
    """All layers of the model, those without a router too."""


class PackedRoutes(NamedTuple):
    """The routes of some tokens, packed."""

    data: bytes
    layers: int
    top_k: int
    dtype: str

    def array(self) -> Routes:
        """Return the routes, of shape [tokens, layers, top_k]."""
        return unpack(*self)

    def raw(self) -> npt.NDArray[Any]:
        """Return the routes as they are packed, of shape [tokens, layers, top_k]."""
        return np.frombuffer(self.data, _DTYPES[self.dtype]).reshape(-1, self.layers, self.top_k)


def dtype_of(experts: int) -> str:
    """Return the type of packed routes: `uint8` or `uint16`. Raise ValueError above 65536 experts."""
    if not 0 < experts <= 65536:
        raise ValueError(f"routes of {experts} experts cannot be packed: 1 to 65536 can")
    return "uint8" if experts <= 256 else "uint16"


def pack(routes: npt.NDArray[Any], experts: int) -> bytes:
    """Return packed routes. Raise ValueError for an expert that the model does not have, or a row that is absent in part."""
    dtype = _DTYPES[dtype_of(experts)]
    if routes.ndim != 3:
        raise ValueError(f"routes have the shape [tokens, layers, top_k], and not {list(routes.shape)}")
    absent = routes == ABSENT
    rows = absent.all((1, 2))
    if ((routes < 0) | (routes >= experts))[~rows].any():
        raise ValueError(f"a route names an expert that is not one of {experts}, or is absent in part")
    return np.where(absent, np.iinfo(dtype).max, routes).astype(dtype).tobytes()


def unpack(data: bytes, layers: int, top_k: int, dtype: str) -> Routes:
    """Return the inverse of `pack`: int32, -1 where a row is absent. Raise ValueError if the size does not fit."""
    if dtype not in _DTYPES:
        raise ValueError(f"routes are packed as uint8 or uint16, and not as {dtype}")
    size = layers * top_k * _DTYPES[dtype].itemsize
    if size <= 0 or len(data) % size:
        raise ValueError(f"{len(data)} bytes are not routes of {layers} layers and {top_k} experts a token")
    packed = np.frombuffer(data, _DTYPES[dtype]).reshape(-1, layers, top_k)
    routes = packed.astype(np.int32)
    routes[(packed == np.iinfo(packed.dtype).max).all((1, 2))] = ABSENT
    return routes


def router_shape(config: Mapping[str, Any]) -> RouterShape | None:
    """Return the routers of a model by its `config.json`; None if it is not a mixture of experts.

    Raise ValueError if it is one, but how many experts a token goes through is not there."""
    text = {**config, **(config.get("text_config") or {})}
    experts = next(
        (int(n) for key in _EXPERTS if (n := text.get(key))),
        0,
    )
    if not experts:
        return None
    top_k = next((int(n) for key in _TOP_K if (n := text.get(key))), 0)
    total = int(text.get("num_hidden_layers") or 0)
    layers = tuple(i for i in range(total) if _has_router(text, i))
    if not (0 < top_k <= experts and layers):
        raise ValueError(
            "its config.json does not show which layers have experts, or how many of them a token goes through"
        )
    return RouterShape(layers, top_k, experts, total)


def _has_router(text: Mapping[str, Any], layer: int) -> bool:
    """Return true if a layer has experts, in the words of any family."""
    kinds = text.get("mlp_layer_types")
    if kinds:
        return bool(kinds[layer] == "sparse")
    if period := text.get("expert_layer_period"):
        return layer % int(period) == int(text.get("expert_layer_offset") or 0)
    if text.get("moe_layers") is not None:
        return layer in text["moe_layers"]
    dense = max(int(text.get(key) or 0) for key in _DENSE_FIRST)
    if layer in (text.get("mlp_only_layers") or ()) or layer < dense:
        return False
    step = next((int(n) for key in _EVERY if (n := text.get(key))), 1)
    every = text.get("moe_layer_freq") or 1
    if isinstance(every, list):
        return bool(every[layer])
    return (layer + 1) % step == 0 and layer % int(every) == 0
