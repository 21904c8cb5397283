"""How much memory a rank needs for a step: arithmetic on shapes, and what to change until it fits.

Pure: `trainer.model.shapes` finds the shapes. All figures are bytes. With FSDP (`[model] dtype = "bfloat16"`, or several ranks)
each layer's weights are gathered when it computes, and its gradients are summed in float32 afterwards. The fullest moment of a
step is one of five: the output head's backward pass (`head`), a layer's (`layers`), the sum of a layer's gradients (`sums`), that
of the gradients outside of layers, at the end (`end`), and the optimizer's step (`step`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from trainer.config.settings import Settings, TrainingSettings

GIB = 2**30
MASTER = 4
"""Bytes of a trained weight, of its gradient and of each of its moments in float32."""
_OWN = 1.5 * GIB
"""Bytes of the device's libraries and queues (CUDA's context, NCCL). Assumed."""
_LOST, _LOST_WITH_ADAPTERS, _LOST_WITH_HOST_GRADIENTS = 0.15, 0.035, 0.39
"""The share that the allocator reserves in addition to tensors: what is lost between them. With all weights trained, gathered
layers and sums of gradients of many sizes are made and freed between tensors that stay, and
so are gradients that leave. Measured with the recipes on a null GPU, whose allocator is real and whose kernels do nothing
(docs/topics/trainer.md), the last with Qwen3-8B alone."""
_EXCHANGED = 3
"""Copies of hidden states that ranks exchange in a layer: sent, received, and returned. Routes are assumed to be even."""
_FEWEST_TOKENS, _MOST_RANKS = 2048, 1024
_WORTH = 0.01
"""A change that saves no more than this share is not named."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Numbers of weights."""

    trained: int
    frozen: int

    @property
    def all(self) -> int:
        """Trained or not."""
        return self.trained + self.frozen


@dataclass(frozen=True, slots=True)
class Shapes:
    """The sizes of a model's weights and of one pass on one rank."""

    weights: Weights
    """The whole model's."""
    layer: Weights
    """The largest layer's."""
    experts: Weights
    """Those of that layer that expert ranks share."""
    outer: Weights
    """Outside of layers: embeddings and output head."""
    matrices: int
    """Trained weights that Muon is for."""
    largest: int
    """Numbers in the largest trained tensor."""
    kept: int
    """Bytes that the layers keep for the backward pass, on the device."""
    kept_on_host: int
    """Bytes of the layers' inputs that wait in the host's memory."""
    head: int
    """The most bytes that the output head takes in addition to `kept`, forwards and backwards."""
    layers: int
    """The most bytes that the layers take in addition to `kept`: one layer's activations and gradients."""
    routed: int
    """The bytes of hidden states of which each expert that a token goes through has one, in one layer; 0 without experts."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Bytes of one rank by what they are for, at the fullest moment of a step."""

    device: Mapping[str, int]
    host: Mapping[str, int]
    """The first rank's memory, without Python and its libraries."""
    moment: str
    """Which moment is the fullest."""
    lost: float
    """The share of the tensors' bytes that is lost between them."""

    @property
    def total(self) -> int:
        """The bytes of all tensors on the device."""
        return sum(self.device.values())

    @property
    def reserved(self) -> int:
        """The memory that PyTorch's allocator reserves: the total, and what is lost between tensors."""
        return int(self.total * (1 + self.lost))

    @property
    def needed(self) -> int:
        """The memory that the device must have: what is reserved, and the memory beyond PyTorch's."""
        return int(self.reserved + _OWN)


def width(settings: Settings) -> int:
    """Return the bytes of a number in a pass."""
    return 4 if settings.model.dtype == "float32" else 2


def predict(shapes: Shapes, settings: Settings, ranks: int, *, reference: bool) -> Prediction:
    """Return the memory of one of `ranks`. `reference`: the run needs the initial weights too, as models of their own."""
    wide, shards = width(settings), ranks // settings.parallel.replicate
    parameters, offload = shapes.weights, settings.optimizer.offload == "host"
    kept_moments = _moments(parameters.trained, shapes.matrices, settings)
    on_host = MASTER * parameters.trained // shards if settings.optimizer.offload_gradients else 0
    static = {
        "weights": (MASTER * parameters.trained + wide * parameters.frozen) // shards,
        "gradients": MASTER * parameters.trained // shards - on_host,
        "moments": 0 if offload else kept_moments // shards,
        "reference model": wide * parameters.all // shards if reference else 0,
    }
    moments = {
        "head": {"activations kept": shapes.kept, "output head": shapes.head},
        "layers": {"activations kept": shapes.kept, "one layer's pass": shapes.layers},
        "step": _at_hand(shapes.largest, settings, shards),
    }
    if ranks > 1 or settings.model.dtype != "float32":
        _add_gathered(moments, shapes, wide, shards, settings.parallel.expert)
    if settings.parallel.expert > 1:
        moments["layers"]["tokens sent to experts"] = _EXCHANGED * shapes.routed
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    host = {
        "moments": kept_moments // shards if offload else 0,
        "gradients": on_host,
        "inputs of layers": shapes.kept_on_host,
        "weights to publish": wide * parameters.all,
        "copy for checkpoints": (MASTER * parameters.trained + kept_moments) // shards,
    }
    if settings.gateway.nodes and settings.gateway.offload in ("auto", "host"):
        host["what leaves while nodes are lent"] = sum(static.values())
    lost = _LOST_WITH_HOST_GRADIENTS if settings.optimizer.offload_gradients else _LOST
    lost = lost if settings.model.lora is None else _LOST_WITH_ADAPTERS
    return Prediction(static | moments[moment], host, moment, lost)


def _at_hand(largest: int, settings: Settings, shards: int) -> dict[str, int]:
    """Return what the step of a weight of `largest` numbers has on the device of what else is in the host's memory."""
    moments = 2 * _moment(settings) if settings.optimizer.offload == "host" else 0
    gradient = MASTER if settings.optimizer.offload_gradients else 0
    return {"moments at hand": moments * largest // shards, "gradient at hand": gradient * largest // shards}


def checkpoint_bytes(trained: int, matrices: int, settings: TrainingSettings) -> int:
    """Return the bytes of a checkpoint of `trained` weights, `matrices` of which Muon is for: they, and their moments."""
    return MASTER * trained + _moments(trained, matrices, settings)


def _moments(trained: int, matrices: int, settings: TrainingSettings) -> int:
    """Return the bytes of the moments: AdamW has two for each weight, Muon one."""
    one = matrices if settings.optimizer.type == "muon" else 0
    return _moment(settings) * (2 * (trained - one) + one)


def _moment(settings: TrainingSettings) -> int:
    """Return the bytes of a moment of one weight."""
    return 2 if settings.optimizer.moments == "bfloat16" else MASTER


def _add_gathered(
    moments: dict[str, dict[str, int]], shapes: Shapes, wide: int, shards: int, expert_ranks: int
) -> None:
    """Add whole weights and gradients, as FSDP has them in a pass, and the float32 buffers in which gradients are summed."""
    outer, layer = shapes.outer, _without_others(shapes.layer, shapes.experts, expert_ranks)

    def summed(trained: int, own: int) -> int:
        return trained * (wide + MASTER) + own * MASTER // shards

    # While a layer computes, the next one is gathered, and several ranks still exchange the gradients of the one before.
    exchanged = MASTER * layer.trained if shards > 1 else 0
    # Gradients of the output head wait for the others outside of layers.
    waiting = wide * outer.trained
    moments |= {"sums": {"activations kept": shapes.kept}, "end": {}}
    for moment, layers, gradients in (
        ("head", 0, 0),
        ("layers", 2, waiting + wide * layer.trained + exchanged),
        ("sums", 1, waiting + summed(layer.trained, shapes.layer.trained)),
        ("end", 0, summed(outer.trained, outer.trained)),
    ):
        moments[moment]["gathered weights"] = wide * (outer.all + layers * layer.all)
        moments[moment]["gradients to be summed"] = gradients


def _without_others(layer: Weights, experts: Weights, expert_ranks: int) -> Weights:
    """Return a layer's weights without the experts that other ranks own."""
    others = Weights(*(n - n // expert_ranks for n in (experts.trained, experts.frozen)))
    return Weights(layer.trained - others.trained, layer.frozen - others.frozen)


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that makes a run smaller, after those before it, and what it then needs."""

    settings: Settings
    ranks: int
    name: str
    prediction: Prediction


def advise(
    predicted: Callable[[Settings, int], Prediction], settings: Settings, ranks: int, memory: int
) -> list[Change]:
    """Return the changes, one after another, with which a run fits into `memory`; none if it does. The last may still not fit."""
    found: list[Change] = []
    now = predicted(settings, ranks)
    for name, values, factor in _changes(settings):
        if now.needed <= memory:
            break
        changed, more = _changed(settings, values), ranks * factor
        then = predicted(changed, more)
        if then.needed < now.needed * (1 - _WORTH):
            settings, ranks, now = changed, more, then
            found.append(Change(settings, ranks, name.format(ranks=ranks), then))
    return found


def _changes(settings: Settings) -> Iterator[tuple[str, dict[str, dict[str, object]], int]]:
    """Change that save memory, the cheapest first: a text, the settings by table, and the factor of the ranks."""
    if settings.model.dtype == "float32":
        yield '[model] dtype = "bfloat16"', {"model": {"dtype": "bfloat16"}}, 1
    if settings.model.activation_checkpointing != 1:
        yield "[model] activation_checkpointing = 1", {"model": {"activation_checkpointing": 1}}, 1
    if not settings.model.activation_offload:
        values: dict[str, object] = {"activation_checkpointing": 1, "activation_offload": True}
        yield "[model] activation_offload = true", {"model": values}, 1
    if settings.optimizer.type == "adamw" and settings.optimizer.moments == "float32":
        yield '[optimizer] moments = "bfloat16"', {"optimizer": {"moments": "bfloat16"}}, 1
    if settings.optimizer.offload == "none":
        yield '[optimizer] offload = "host"', {"optimizer": {"offload": "host"}}, 1
    if not settings.optimizer.offload_gradients:
        host: dict[str, object] = {"offload": "host", "offload_gradients": True}
        yield "[optimizer] offload_gradients = true", {"optimizer": host}, 1
    tokens = settings.batch.tokens // 2
    while tokens >= _FEWEST_TOKENS:
        yield f"[batch] tokens = {tokens} (if no episode is longer)", {"batch": {"tokens": tokens}}, 1
        tokens //= 2
    for _ in range(_MOST_RANKS.bit_length() - 1):
        yield "{ranks} ranks", {"parallel": {"shard": None}}, 2


def _changed(settings: Settings, values: Mapping[str, Mapping[str, object]]) -> Settings:
    tables = {
        table: getattr(settings, table).model_copy(update=dict(change)) for table, change in values.items()
    }
    return settings.model_copy(update=tables)
