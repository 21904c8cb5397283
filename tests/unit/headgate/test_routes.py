from __future__ import annotations

import numpy as np
import pytest

from headgate.routes import RouterShape, dtype_of, pack, router_shape, unpack


@pytest.mark.parametrize("experts", [4, 256, 257])
def test_unpacking_returns_what_was_packed_with_absent_rows_and_the_last_expert(experts: int) -> None:
    routes = np.random.default_rng(1).integers(0, experts, (5, 3, 2), np.int32)
    routes[1], routes[3, 0] = -1, experts - 1
    dtype = dtype_of(experts)
    packed = pack(routes, experts)
    assert len(packed) == routes.size * (1 if experts <= 256 else 2)
    assert np.array_equal(unpack(packed, 3, 2, dtype), routes)


@pytest.mark.parametrize("wrong", [4, -2, -1])
def test_an_expert_that_the_model_lacks_is_refused(wrong: int) -> None:
    routes = np.zeros((2, 3, 2), np.int32)
    routes[1, 2, 1] = wrong
    with pytest.raises(ValueError, match="not one of 4"):
        pack(routes, 4)


def test_bytes_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="3 layers and 2 experts"):
        unpack(bytes(7), 3, 2, "uint8")


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"num_experts": 8, "num_experts_per_tok": 2}, (0, 1, 2, 3)),
        ({"num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2}, (1, 3)),
        ({"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [1]}, (0, 2, 3)),
        ({"n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1}, (1, 2, 3)),
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, (0, 1, 2, 3)),
        ({"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 1, "moe_layer_interval": 2}, (1, 3)),
        ({"num_experts": 8, "num_experts_per_token": 2, "num_dense_layers": 2}, (2, 3)),
        (
            {"num_experts": 8, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1},
            (1, 3),
        ),
        ({"text_config": {"num_experts": 8, "num_experts_per_tok": 2}}, (0, 1, 2, 3)),
    ],
)
def test_the_layers_with_routers_are_those_of_the_family(
    config: dict[str, object], layers: tuple[int, ...]
) -> None:
    assert router_shape({"num_hidden_layers": 4, **config}) == RouterShape(layers, 2, 8, 4)


def test_a_dense_model_has_no_routers() -> None:
    assert router_shape({"num_hidden_layers": 4, "num_experts": None}) is None
