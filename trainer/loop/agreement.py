"""What the settings of trainer and gateway must agree on before anything is trained. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headgate.routes import RouterShape
from trainer.algorithms import Algorithm, learns_from_equal
from trainer.config.settings import Settings
from trainer.errors import ConfigError


def check_dropped(settings: Settings, algorithm: Algorithm, drop_equal: bool) -> None:
    """Raise ConfigError if the gateway drops groups of equal rewards, from which this run would learn."""
    if not drop_equal:
        return
    if settings.distill is not None:
        raise ConfigError(
            "[distill] learns from groups of equal rewards too, and the gateway drops them: set [staleness] drop_equal = false in"
            " the gateway's file"
        )
    if learns_from_equal(algorithm):
        raise ConfigError(
            f"[algorithm] type = {settings.algorithm.type!r} compares each reward with those of the whole batch, and the gateway"
            " leaves groups of equal rewards out of it, which biases the mean: set [staleness] drop_equal = false in the"
            " gateway's file, or [algorithm] group_baseline = true"
        )


def check_teacher(settings: Settings, sees_images: bool) -> None:
    """Raise ConfigError if the run has a teacher and its model is trained on images, which no teacher is given."""
    if settings.distill is not None and sees_images:
        raise ConfigError(
            f"[distill] scores text alone, and {settings.model.path} is trained on images: leave [distill] out"
        )


def warn_uncorrected(settings: Settings, quantization: str | None) -> str:
    """Return a warning if engines sample from rounded weights and nothing corrects the difference; else an empty string."""
    algorithm = settings.algorithm.model_dump()
    masks = [name for name in ("mask_token", "mask_sequence", "mask_geometric") if algorithm.get(name)]
    if quantization is None or masks or algorithm.get("correction") != "none":
        return ""
    return (
        f'warning: engines sample from {quantization} weights, and [algorithm] correction = "none" trains the difference: take'
        ' "tis_token", or set a mask'
    )


def check_length(settings: Settings, engines: int) -> None:
    """Raise ConfigError if positions were made for another length than that of the engines' rows."""
    own = settings.model.max_model_len
    if own is not None and own != engines:
        raise ConfigError(
            f"[model] max_model_len = {own}, but engines accept rows of {engines} tokens ([models.NAME] max_model_len in the"
            " gateway's file): set both to the same value"
        )


def check_routers(replayed: RouterShape | None, recorded: Mapping[str, Any] | None) -> None:
    """Raise ConfigError if experts are replayed that the gateway does not record, or those of other routers.

    `recorded`: the routers by `RouterShape`'s names; None if there are no records.
    """
    if replayed is None:
        return
    if recorded is None:
        raise ConfigError(
            "[model] router_replay = true: the gateway records no experts: set router_replay = true in its [models.NAME], or set"
            " it to false here"
        )
    found = RouterShape(**{**recorded, "layers": tuple(recorded["layers"])})
    if found != replayed:
        raise ConfigError(
            f"[model] router_replay = true: the gateway records {_routers(found)}, and the model has {_routers(replayed)}:"
            " both need the same checkpoint"
        )


def _routers(shape: RouterShape) -> str:
    return f"{shape.top_k} of {shape.experts} experts in {len(shape.layers)} of {shape.total_layers} layers"
