"""How pixels are interpolated."""

from enum import Enum


class InterpolationMode(Enum):
    """The modes that processors name."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
